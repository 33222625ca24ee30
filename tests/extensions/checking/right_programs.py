"""Correct programs, by name, which all checks must pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.utils.data import TensorDataset

from pytorch_accel_lite import Trainer, TrainerCallback, TrainerPlaceholderValues
from pytorch_accel_lite.data import OwnShard
from tests.extensions.checking.program_parts import (
    CLASSES,
    PAD,
    Images,
    Own,
    Program,
    SequenceModel,
    classifier,
    convnet,
    dropping,
    features,
    jitter,
    known_tokens,
    labelled,
    mlp,
    next_token,
    of_images,
    of_sentences,
    own,
    padded_tokens,
    regression,
    regressor,
    rnn,
    scaled,
    series,
    tokens,
)
from tests.small_models import Stream


def masked_tokens(model, batch):
    (ids,) = batch
    hidden = torch.arange(ids.shape[1]) % 4 == 1
    logits = model(ids.masked_fill(hidden, PAD))
    return F.cross_entropy(logits.transpose(1, 2), ids.masked_fill(~hidden, -100))


def variational(model, batch):
    again, mean, spread = model(batch[0])
    divergence = 0.5 * (mean**2 + spread.exp() - 1 - spread).sum(1).mean()
    return {"loss": {"rebuilt": F.mse_loss(again, batch[0]), "divergence": 0.01 * divergence}}


def sampled(m, x):
    mean, spread = m.encoder(x).chunk(2, 1)
    return m.decoder(mean + torch.randn_like(mean) * (spread / 2).exp()), mean, spread


def contrastive(model, batch):
    one, two = (F.normalize(model(batch[0] + 0.1 * torch.randn_like(batch[0])), dim=1) for _ in range(2))
    return F.cross_entropy(one @ two.T / 0.2, torch.arange(len(one)))


def metric_learning(points, labels):
    points, same_class = F.normalize(points, dim=1), (labels[:, None] == labels).float()
    distances = (points[:, None] - points[None]).square().sum(-1)
    return (same_class * distances + (1 - same_class) * (0.5 - distances).relu()).mean()


def ranking(scores, targets):
    better, scores = (targets[:, None] > targets[None, :]).float(), scores.squeeze(1)
    return (better * F.softplus(-(scores[:, None] - scores[None, :]))).sum() / better.sum().clamp(min=1)


def denoising(model, batch):
    share, noise = torch.rand(len(batch[0]), 1), torch.randn_like(batch[0])
    return F.mse_loss(model(torch.cat([share.sqrt() * batch[0] + (1 - share).sqrt() * noise, share], 1)), noise)


def tasks(model, batch):
    outputs = model(batch[0])
    losses = F.cross_entropy(outputs[:, :CLASSES], batch[1]), F.mse_loss(outputs[:, -1], batch[0].sum(1))
    return {"loss": dict(zip(("class", "sum"), losses, strict=True)), "model_outputs": outputs}


def gaussian(outputs, targets):
    mean, log_variance = outputs.chunk(2, 1)
    return (0.5 * ((targets - mean) ** 2 / log_variance.exp() + log_variance)).mean()


class Adversarial(Trainer):
    def __init__(self):
        generator, self.critic = nn.Linear(4, 10), mlp(1)
        optimizers = {
            name: torch.optim.Adam(part.parameters()) for name, part in {"g": generator, "d": self.critic}.items()
        }
        super().__init__(generator, None, optimizers, callbacks=[])

    def train_step(self, batch):
        (real,) = batch
        fake = self.model(torch.randn(len(real), 4))
        self.update((F.softplus(-self.critic(real)) + F.softplus(self.critic(fake.detach()))).mean(), "d")
        self.update(F.softplus(-self.critic(fake)).mean(), "g")


class Memory:
    """The hidden state of a network that continues with each batch."""

    hidden: Any = None

    def state_dict(self):
        return {"hidden": self.hidden}

    def load_state_dict(self, state):
        self.hidden = state["hidden"]


class Continues(Trainer):
    """Truncated backpropagation through time, with a state that is registered."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.memory = Memory()
        self.register_for_checkpointing("memory", self.memory)

    def calculate_train_batch_loss(self, batch):
        outputs, hidden = self.model.rnn(batch[0], self.memory.hidden)
        self.memory.hidden = hidden.detach()
        return {"loss": F.cross_entropy(self.model.head(outputs[:, -1]), batch[1])}

    calculate_eval_batch_loss = calculate_train_batch_loss


def summed_over_pixels(outputs, targets):
    return F.binary_cross_entropy_with_logits(outputs, targets, reduction="sum") / len(outputs)


def of_slopes(model, batch):
    """The loss of a physics-informed network, which takes derivatives by its inputs."""
    x = batch[0].clone().requires_grad_()
    values = model(x)
    (slopes,) = torch.autograd.grad(values.sum(), x, create_graph=True)
    return F.mse_loss(slopes, batch[0].cos()) + F.mse_loss(values, batch[0].sin().sum(1, keepdim=True))


class TwoUpdates(Trainer):
    """Makes two updates with each batch."""

    def train_step(self, batch):
        for _ in range(2):
            output = self.calculate_train_batch_loss(batch)
            self.update(output["loss"])
        return output


class Clips(TrainerCallback):
    """Changes gradients, and needs an event that comes before those of a step."""

    def on_training_run_start(self, trainer, **kwargs):
        self.limit = 1.0

    def on_optimizer_step_start(self, trainer, **kwargs):
        nn.utils.clip_grad_value_(trainer.model.parameters(), self.limit)


def lbfgs():
    model = mlp(1)
    return regressor(model, optimizer=torch.optim.LBFGS(model.parameters(), lr=0.5))


def frozen_body():
    model = dropping(nn.BatchNorm1d(32))
    model[:2].requires_grad_(False)
    return model


def adapters():
    parts = {"a": nn.Parameter(torch.randn(10, 2)), "b": nn.Parameter(torch.zeros(2, CLASSES))}
    return Own(lambda m, x: m.base(x) + x @ m.a @ m.b, base=nn.Linear(10, CLASSES).requires_grad_(False), **parts)


def images_with_one_cycle():
    per_epoch = TrainerPlaceholderValues.NUM_UPDATE_STEPS_PER_EPOCH
    cycle = partial(lr_scheduler.OneCycleLR, max_lr=0.01, total_steps=TrainerPlaceholderValues.NUM_EPOCHS * per_epoch)
    evaluation = TensorDataset(torch.rand(32, 1, 8, 8), torch.randint(0, 4, (32,)))
    model = convnet(nn.BatchNorm2d(8), nn.Dropout(0.2))
    return classifier(model, None, Images(), eval_dataset=evaluation, create_scheduler_fn=cycle, num_epochs=5)


def in_bfloat16():
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    return classifier(options={"accelerator": accelerator}, gradient_accumulation_steps=2)


def segmentation():
    images = torch.rand(32, 1, 8, 8)
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 1))
    return classifier(model, None, TensorDataset(images, (images[:, 0] > 0.5).long()))


def forecasting():
    steps = torch.randn(64, 11, 2).cumsum(1)
    model = Own(lambda m, x: m.head(m.rnn(x)[0]), rnn=nn.GRU(2, 16, batch_first=True), head=nn.Linear(16, 2))
    return regressor(model, data=TensorDataset(steps[:, :-1], steps[:, 1:]))


def missing_targets():
    x, y = regression().tensors
    y[::3] = math.nan
    return regressor(loss=lambda a, b: (a - b)[~b.isnan()].square().mean(), data=TensorDataset(x, y))


def full_graph():
    adjacency = torch.eye(60) + (torch.rand(60, 60) > 0.9)
    nodes = features(60)
    model = Own(lambda m, x: m.second(adjacency @ m.first(adjacency @ x).relu()), first=nn.Linear(10, 16))
    model.second = nn.Linear(16, 3)
    return classifier(model, data=OwnShard([(nodes, nodes[:, :3].argmax(1))]))


def policy():
    def step(model, batch):
        actions = torch.distributions.Categorical(logits=model(batch[0]))
        chosen = actions.sample()
        return -(actions.log_prob(chosen) * ((chosen == 1) == (batch[0][:, 0] > 0)).float().sub(0.5)).mean()

    return own(mlp(2), step)


def temporal(outputs, targets):
    lengths = (torch.full((len(part),), part.shape[1]) for part in (outputs, targets))
    return F.ctc_loss(outputs.transpose(0, 1), targets, *lengths)


def quantiles(outputs, targets):
    apart, levels = targets - outputs, torch.tensor([0.1, 0.5, 0.9])
    return torch.maximum(levels * apart, (levels - 1) * apart).mean()


def deep():
    """Small weights and batch norm that has seen nothing: in an evaluation, all outputs are nearly the same."""
    layers = [layer for _ in range(12) for layer in (nn.Linear(10, 10), nn.BatchNorm1d(10), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(10, CLASSES))
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.005)
    return classifier(model, lr=1e-3)


X = features()


RIGHT: dict[str, Callable[[], Program]] = {
    "classifier": lambda: classifier(eval_dataset=labelled(seed=1)),
    "regression": lambda: regressor(eval_dataset=regression(seed=1)),
    "line without noise": lambda: regressor(nn.Linear(10, 1), data=TensorDataset(X, 3 * X[:, :1] + 1)),
    "random labels": lambda: classifier(data=TensorDataset(X, torch.randint(0, CLASSES, (200,)))),
    "images, batch norm, dropout, one cycle": images_with_one_cycle,
    "augmented images": lambda: of_images(Images(jitter)),
    "causal language model": lambda: own(SequenceModel(dropout=0.1), next_token, TensorDataset(tokens())),
    "masked language model": lambda: own(SequenceModel(causal=False), masked_tokens, TensorDataset(tokens())),
    "sentences with a mask": lambda: of_sentences(lambda m, x, mask: (x * mask).sum(1) / mask.sum(1)),
    "tokens with their number": lambda: own(SequenceModel(), known_tokens, padded_tokens()),
    "autoencoder": lambda: own(
        nn.Sequential(nn.Linear(10, 3), nn.Tanh(), nn.Linear(3, 10)),
        lambda model, batch: F.mse_loss(model(batch[0]), batch[0]),
    ),
    "variational autoencoder": lambda: own(
        Own(sampled, encoder=nn.Linear(10, 6), decoder=nn.Linear(3, 10)), variational
    ),
    "contrastive": lambda: own(mlp(8), contrastive),
    "metric learning": lambda: classifier(mlp(8), metric_learning),
    "ranking": lambda: regressor(loss=ranking, data=regression(column=False)),
    "generative adversarial": lambda: (Adversarial(), TensorDataset(X), {}),
    "two updates in a step": lambda: classifier(kind=TwoUpdates),
    "callback of one's own": lambda: classifier(options={"callbacks": [Clips()]}),
    "LBFGS": lbfgs,
    "stream": lambda: regressor(mlp(1, inputs=4), data=Stream(64)),
    "frozen body": lambda: classifier(frozen_body()),
    "low-rank adapters": lambda: classifier(adapters()),
    "last layer of zeros": lambda: classifier(scaled(mlp(), 0.0)),
    "several losses": lambda: own(mlp(CLASSES + 1), tasks),
    "segmentation": segmentation,
    "many labels": lambda: classifier(mlp(4), nn.BCEWithLogitsLoss(), TensorDataset(X, (X[:, :4] > 0).float())),
    "smoothed and weighted classes": lambda: classifier(
        loss=nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2, 3, 1, 1]), label_smoothing=0.1)
    ),
    "Gaussian likelihood": lambda: regressor(mlp(2), gaussian),
    "denoising diffusion": lambda: own(mlp(10, inputs=11), denoising),
    "bfloat16 with accumulation": in_bfloat16,
    "recurrent with batch_first": lambda: classifier(
        Own(lambda m, x: m.head(m.rnn(x)[0][:, -1]), **rnn(batch_first=True, num_layers=2, dropout=0.1)), data=series()
    ),
    "forecasting": forecasting,
    "missing targets": missing_targets,
    "state that is registered": lambda: classifier(
        Own(lambda m, x: m.head(m.rnn(x)[0][:, -1]), **rnn(batch_first=True)), data=series(), kind=Continues
    ),
    "loss summed over pixels": lambda: classifier(
        mlp(400), summed_over_pixels, TensorDataset(X, (torch.rand(200, 400) > 0.5).float())
    ),
    "loss of slopes": lambda: own(mlp(1), of_slopes, TensorDataset(X)),
    "nodes of a graph": full_graph,
    "policy gradient": policy,
    "triplets": lambda: own(
        mlp(8), lambda model, b: nn.TripletMarginLoss()(*map(model, b)), TensorDataset(X, X + 0.1, X.flip(0))
    ),
    "connectionist temporal classification": lambda: classifier(
        Own(
            lambda m, x: m.head(m.rnn(x)[0]).log_softmax(2), rnn=nn.GRU(4, 16, batch_first=True), head=nn.Linear(16, 6)
        ),
        temporal,
        TensorDataset(torch.randn(64, 12, 4), torch.randint(1, 6, (64, 4))),
    ),
    "quantiles": lambda: regressor(mlp(3), quantiles),
    "causal convolutions": lambda: regressor(
        Own(lambda m, x: m.conv(F.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2), conv=nn.Conv1d(2, 2, 3)),
        data=TensorDataset(*(lambda steps: (steps[:, :-1], steps[:, 1:]))(torch.randn(64, 11, 2).cumsum(1))),
    ),
    "deep network in evaluation": deep,
    "logical processes": lambda: classifier(options={"seed": 1, "logical_processes": 2}),
}
