"""Programs with a mistake, by name, and the check that should find it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from pytorch_accel_lite import Trainer
from tests.extensions.checking.program_parts import (
    CLASSES,
    WORDS,
    Images,
    Own,
    Program,
    SequenceModel,
    classifier,
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
    shifted_twice,
    tokens,
    with_schedule,
)


class WithoutEvalMode(Trainer):
    def eval_epoch_start(self):
        pass


class WithoutTrainMode(Trainer):
    def train_epoch_start(self):
        self.model.eval()


class LeavesEvalMode(Trainer):
    def calculate_train_batch_loss(self, batch):
        output = super().calculate_train_batch_loss(batch)
        self.model.eval()
        return output


class ResetsWeights(Trainer):
    def optimizer_step(self):
        super().optimizer_step()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(0.1)


class NeverSteps(Trainer):
    def optimizer_step(self):
        pass


class KeepsGradients(Trainer):
    def optimizer_zero_grad(self):
        pass


class DoublesGradientsOfOne(Trainer):
    def backward_step(self, loss):
        super().backward_step(loss if self.logical is None else 2 * loss)


class TargetsOfBefore(Trainer):
    """Keeps the targets of a batch, as of a queue, and compares with those of the batch before."""

    kept: Any = None

    def calculate_train_batch_loss(self, batch):
        inputs, targets = batch
        before, self.kept = self.kept, targets
        return super().calculate_train_batch_loss([inputs, targets if before is None else before])


class EvaluatesItself(Trainer):
    """In evaluations, compares the predictions with themselves."""

    def calculate_eval_batch_loss(self, batch):
        outputs = self.model(batch[0])
        return {"loss": F.cross_entropy(outputs, outputs.argmax(1)), "model_outputs": outputs}


class Decays(Trainer):
    """Keeps a number that training changes, of a kind that no state can contain."""

    factor = Fraction(1)

    def optimizer_step(self):
        self.factor = self.factor / 2
        for group in self.optimizer.param_groups:
            group["lr"] = 0.01 * float(self.factor)
        super().optimizer_step()


class Proxies(nn.Module):
    def __init__(self):
        super().__init__()
        self.proxies = nn.Parameter(torch.randn(CLASSES, 8))

    def forward(self, points, targets):
        return F.cross_entropy(F.normalize(points, dim=1) @ F.normalize(self.proxies, dim=1).T, targets)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = mlp()

    def forward(self, image, sound):
        return self.body(image)


class OneImage(Images):
    def __getitem__(self, index):
        return self.images[0], self.labels[0]


class OwnGenerator(Images):
    def __init__(self):
        super().__init__(self.distort)
        self.rng = np.random.default_rng(0)

    def distort(self, image):
        return image + torch.from_numpy(self.rng.normal(size=image.shape)).float()


class Seeds(Images):
    def __getitem__(self, index):
        torch.manual_seed(0)
        return super().__getitem__(index)


class Caches(Images):
    def __init__(self):
        super().__init__(jitter)
        self.cache = {}

    def __getitem__(self, index):
        if index not in self.cache:
            self.cache[index] = super().__getitem__(index)
        return self.cache[index]


class Running(nn.Module):
    """Centres its inputs with a running mean that is no buffer."""

    def __init__(self):
        super().__init__()
        self.body, self.mean = mlp(), torch.zeros(10)

    def forward(self, x):
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * (x + 3).mean(0).detach()
        return self.body(x + 3 - self.mean)


class KeepsHidden(nn.Module):
    """A recurrent network that begins where the batch before has ended."""

    def __init__(self):
        super().__init__()
        self.rnn, self.head, self.hidden = nn.GRU(4, 16, batch_first=True), nn.Linear(16, 2), None

    def forward(self, x):
        outputs, self.hidden = self.rnn(x, self.hidden)
        self.hidden = self.hidden.detach()
        return self.head(outputs[:, -1])


def weighted_by_a_column(outputs, targets):
    return (F.cross_entropy(outputs, targets, reduction="none") * torch.ones(len(targets), 1)).mean()


def of_halves(x):
    return TensorDataset(x, torch.zeros(len(x), dtype=torch.long))


def with_nan():
    data = labelled()
    data.tensors[0][137, 3] = math.nan
    return data


def head_only():
    model = mlp()
    return classifier(model, optimizer=torch.optim.SGD(model[0].parameters(), lr=0.1))


def listed_layers():
    layers = [nn.Linear(10, 10), nn.Linear(10, 10)]
    return Own(
        lambda m, x: m.head(m.layers[1](m.layers[0](x).relu()).relu()), layers=layers, head=nn.Linear(10, CLASSES)
    )


def norm_at_zero(m, x):
    y = m.layer(x).relu()
    return (y - y).pow(2).sum(1, keepdim=True).sqrt() + y


def attention_with_dropout(m, x):
    q, k, v = m.inputs(x).chunk(3, -1)
    return m.head(F.scaled_dot_product_attention(q, k, v, dropout_p=0.1).mean(1))


def is_positive(x):
    return TensorDataset(x, (x.sum(1, keepdim=True) > 0).float())


def sorted_by_label():
    x, y = labelled().tensors
    return TensorDataset(x[y.argsort()], y.sort().values)


def two_datasets(repeated=False):
    data = ConcatDataset([labelled(), labelled()]) if repeated else labelled()
    order = random.Random(0).sample(range(len(data)), len(data))
    return classifier(data=Subset(data, order[:150]), eval_dataset=Subset(data, order[100:]))


#: Programs with a mistake, by the check that should find it, with where people make it.
WRONG: dict[str, tuple[str, Callable[[], Program]]] = {
    # the warning of torch's MSELoss about sizes, in many forum threads
    "mse of a column and a row": ("broadcast", lambda: regressor(data=regression(column=False))),
    # Tobin, "Troubleshooting deep neural networks" (2019): silent broadcasting
    "own loss of a column and a row": (
        "broadcast",
        lambda: regressor(loss=lambda a, b: ((a - b) ** 2).mean(), data=regression(column=False)),
    ),
    "weights of samples are a column": ("broadcast", lambda: classifier(loss=weighted_by_a_column)),  # forum
    "cross entropy of one output": ("broadcast", lambda: classifier(mlp(1), data=of_halves(features()))),  # forum
    # Karpathy, "Most common neural net mistakes" (2018): softmaxed outputs
    "softmax before cross entropy": ("initial_loss", lambda: classifier(mlp(CLASSES, nn.Softmax(1)))),
    "sigmoid before BCE with logits": (  # forum
        "initial_loss",
        lambda: classifier(mlp(1, nn.Sigmoid()), nn.BCEWithLogitsLoss(), is_positive(features())),
    ),
    "nll of logits": ("initial_loss", lambda: classifier(loss=nn.NLLLoss())),  # the note in torch's NLLLoss
    "divergence of probabilities": (  # the note in torch's KLDivLoss
        "initial_loss",
        lambda: classifier(
            mlp(CLASSES, nn.Softmax(1)),
            nn.KLDivLoss(reduction="batchmean"),
            TensorDataset(features(), features(width=CLASSES).softmax(1)),
        ),
    ),
    # Karpathy, "A recipe for training neural networks" (2019): verify the loss at the start
    "badly scaled weights": ("initial_loss", lambda: classifier(scaled(mlp(), 100.0))),
    # "37 reasons why your neural network is not working" (2017)
    "relu on the outputs of a regression": ("initial_loss", lambda: regressor(mlp(1, nn.ReLU()))),
    "detached features": (  # forum: "my encoder does not train"
        "gradients",
        lambda: classifier(
            Own(lambda m, x: m.head(m.body(x).detach().relu()), body=nn.Linear(10, 16), head=nn.Linear(16, CLASSES))
        ),
    ),
    # forum: the model was replaced after the optimizer was created
    "optimizer of another model": (
        "gradients",
        lambda: classifier(optimizer=torch.optim.SGD(mlp().parameters(), lr=0.1)),
    ),
    "head is not in the optimizer": ("gradients", head_only),  # forum: transfer learning
    "layers in a plain list": ("gradients", lambda: classifier(listed_layers())),  # forum: nn.ModuleList or a list
    # documentation of pytorch-metric-learning: the loss needs an optimizer, too
    "loss with parameters of its own": ("gradients", lambda: classifier(mlp(8), Proxies())),
    "norm at zero": ("gradients", lambda: regressor(Own(norm_at_zero, layer=nn.Linear(10, 1)))),  # forum: sqrt at 0
    "layer that is never called": (  # find_unused_parameters of DistributedDataParallel
        "gradients",
        lambda: classifier(Own(lambda m, x: m.head(x), head=nn.Linear(10, CLASSES), other=nn.Linear(10, 10))),
    ),
    "zero_grad is missing": ("gradients", lambda: classifier(kind=KeepsGradients)),  # Karpathy (2018)
    "softmax over the batch": (  # the implicit dimension of softmax, of which torch warns
        "batch_independence",
        lambda: classifier(
            Own(lambda m, x: m.head(x * m.gate(x).softmax(0)), gate=nn.Linear(10, 10), head=nn.Linear(10, CLASSES))
        ),
    ),
    "recurrent without batch_first": (  # forum: the most frequent question about nn.LSTM
        "batch_independence",
        lambda: classifier(Own(lambda m, x: m.head(m.rnn(x)[0][:, -1]), **rnn()), data=series()),
    ),
    "attention without batch_first": (
        "batch_independence",
        lambda: classifier(
            Own(lambda m, x: m.head(m.a(x, x, x)[0].mean(1)), a=nn.MultiheadAttention(8, 2), head=nn.Linear(8, 2)),
            data=series(8),
        ),
    ),
    "view in place of transpose": (  # Karpathy (2018): "thinking view() and permute() are the same thing"
        "batch_independence",
        lambda: classifier(Own(lambda m, x: m.head(m.rnn(x.reshape(6, -1, 4))[0][-1]), **rnn()), data=series()),
    ),
    "normalised by the whole batch": (
        "batch_independence",
        lambda: classifier(Own(lambda m, x: m.body((x - x.mean()) / x.std()), body=mlp())),
    ),
    "targets shifted over samples": (  # logits[:-1] in place of logits[:, :-1]
        "permutation",
        lambda: own(mlp(), lambda model, batch: F.cross_entropy(model(batch[0])[:-1], batch[1][1:])),
    ),
    "functional dropout in evaluation": (  # forum: training=True is the default of F.dropout
        "determinism",
        lambda: classifier(Own(lambda m, x: m.body(F.dropout(x, 0.2)), body=mlp())),
    ),
    # Karpathy (2018): "you forgot to toggle train/eval mode"
    "evaluation in training mode": (
        "determinism",
        lambda: classifier(dropping(nn.BatchNorm1d(32)), kind=WithoutEvalMode, eval_dataset=labelled(seed=1)),
    ),
    "training in evaluation mode": ("determinism", lambda: classifier(dropping(), kind=WithoutTrainMode)),
    "attention always drops out": (  # the note in torch's scaled_dot_product_attention
        "determinism",
        lambda: classifier(Own(attention_with_dropout, inputs=nn.Linear(4, 24), head=nn.Linear(8, 2)), data=series()),
    ),
    # a metric computed within the step
    "step leaves evaluation mode": ("determinism", lambda: classifier(dropping(), kind=LeavesEvalMode)),
    "noise that evaluation adds, too": (
        "determinism",
        lambda: classifier(Own(lambda m, x: m.body(x + 0.3 * torch.randn_like(x)), body=mlp())),
    ),
    # forum: the hidden state of an LSTM must be reset between batches
    "hidden state is kept": ("determinism", lambda: classifier(KeepsHidden(), data=series())),
    "sum over the batch": (  # the learning rate depends on the batch size
        "mean_loss",
        lambda: regressor(loss=nn.MSELoss(reduction="sum"), lr=1e-3),
    ),
    "divided by the batch size twice": (
        "mean_loss",
        lambda: classifier(loss=lambda a, b: F.cross_entropy(a, b) / len(b)),
    ),
    # "gradient accumulation fix" of transformers and Unsloth (2024)
    "mean over tokens without their number": (
        "mean_loss",
        lambda: own(SequenceModel(), partial(known_tokens, counts=False), padded_tokens()),
    ),
    "gradients depend on the processes": ("processes", lambda: classifier(kind=DoublesGradientsOfOne)),
    # Karpathy (2019): use backprop to chart dependencies
    "no causal mask": ("causality", lambda: own(SequenceModel(causal=False), next_token, TensorDataset(tokens()))),
    "targets are not shifted": (
        "causality",
        lambda: own(SequenceModel(), partial(next_token, shift=0), TensorDataset(tokens())),
    ),
    # the documentation of GPT2LMHeadModel: labels are shifted inside the model
    "targets are shifted twice": ("causality", lambda: own(SequenceModel(), shifted_twice, TensorDataset(tokens()))),
    "bidirectional language model": (  # forum: "my LSTM language model has a perplexity of 1"
        "causality",
        lambda: own(
            Own(
                lambda m, ids: m.head(m.rnn(m.embedding(ids))[0]),
                embedding=nn.Embedding(WORDS, 16),
                rnn=nn.LSTM(16, 16, batch_first=True, bidirectional=True),
                head=nn.Linear(32, WORDS),
            ),
            next_token,
            TensorDataset(tokens()),
        ),
    ),
    # sentence-transformers' documentation: mean pooling must take the mask into account
    "padding in the mean": ("padding", lambda: of_sentences(lambda m, x, mask: x.mean(1))),
    "padding in the loss": ("padding", lambda: of_sentences(lambda m, x, mask: x, tags=True)),  # ignore_index forgotten
    "backward rnn reads padding first": (  # the documentation of pack_padded_sequence
        "padding",
        lambda: of_sentences(
            lambda m, x, mask: torch.cat([*m.rnn(x)[1]], 1), rnn=nn.GRU(16, 8, batch_first=True, bidirectional=True)
        ),
    ),
    "rate is far too high": ("learns", lambda: regressor(lr=300.0)),  # Karpathy (2019): overfit a single batch
    "rate is far too low": ("learns", lambda: classifier(lr=1e-9)),
    "loss is maximised": ("learns", lambda: classifier(loss=lambda a, b: -F.cross_entropy(a, b), lr=1e-3)),
    "weights are reset in each step": ("learns", lambda: classifier(kind=ResetsWeights)),
    "inputs are overwritten": (  # a variable of the same name
        "inputs_matter",
        lambda: classifier(
            Own(lambda m, x: m.body(m.start.expand(len(x), -1)), body=mlp(), start=nn.Parameter(torch.zeros(10)))
        ),
    ),
    "one of two inputs is ignored": (
        "inputs_matter",
        lambda: classifier(TwoInputs(), data=[{"image": x, "sound": x.flip(0), "labels": y} for x, y in labelled()]),
    ),
    "NaN in a sample": ("data", lambda: classifier(data=with_nan())),  # "37 reasons": bad data
    # forum: "Target 5 is out of bounds", or an assertion on the device
    "labels begin at one": ("data", lambda: classifier(data=TensorDataset(features(), labelled().tensors[1] + 1))),
    "pixels are not scaled": (  # "37 reasons": check the preprocessing
        "data",
        lambda: of_images(TensorDataset(torch.randint(0, 256, (64, 1, 8, 8)).float(), torch.randint(0, 4, (64,)))),
    ),
    "target is among the inputs": (  # Kapoor and Narayanan, "Leakage and the reproducibility crisis" (2023)
        "data",
        lambda: regressor(
            mlp(1, inputs=11), data=TensorDataset(torch.cat(regression().tensors, 1), regression().tensors[1])
        ),
    ),
    "sorted and not shuffled": (  # "37 reasons": shuffle the dataset
        "data",
        lambda: classifier(
            data=sorted_by_label(), train_dataloader_kwargs={"shuffle": False}, per_device_batch_size=16
        ),
    ),
    "labels of BCE are minus one and one": (
        "data",
        lambda: classifier(
            mlp(1), nn.BCEWithLogitsLoss(), TensorDataset(features(), features().sum(1, keepdim=True).sign())
        ),
    ),
    "evaluation is scaled differently": (  # statistics forgotten in the transform for validation
        "data",
        lambda: classifier(eval_dataset=TensorDataset(100 * features(seed=1) + 300, labelled(seed=1).tensors[1])),
    ),
    "always the same sample": ("data", lambda: of_images(OneImage())),  # an index that is not used
    "nearly all samples are of a class": ("data", lambda: classifier(data=of_halves(features()))),
    "evaluation data are training data": ("leakage", two_datasets),
    "oversampled before the split": ("leakage", partial(two_datasets, repeated=True)),  # Kapoor and Narayanan (2023)
    # the training transform in both datasets
    "evaluation data are augmented": ("augmentation", lambda: of_images(Images(jitter), eval_dataset=Images(jitter))),
    # Pärnamaa, "Using PyTorch + NumPy? You're making a mistake" (2021)
    "each worker draws the same": (
        "augmentation",
        lambda: of_images(OwnGenerator(), train_dataloader_kwargs={"num_workers": 2}),
    ),
    "__getitem__ seeds torch": ("augmentation", lambda: of_images(Seeds(jitter))),
    "augmented images are cached": ("augmentation", lambda: of_images(Caches())),
    "statistics are no buffers": ("reload", lambda: classifier(Running())),  # forum: not in the state_dict
    "state of the trainer is not saved": ("reload", lambda: classifier(kind=Decays)),
    # Micikevicius et al., "Mixed precision training" (2018): keep a float32 copy
    "weights in half precision": (
        "precision",
        lambda: classifier(Own(lambda m, x: m.body(x.half()).float(), body=mlp().half())),
    ),
    # forum: T_max in epochs, scheduler.step() in the inner loop
    "cosine in epochs stepped by updates": (
        "schedule",
        lambda: with_schedule(partial(lr_scheduler.CosineAnnealingLR, T_max=10)),
    ),
    "exponential stepped by updates": (
        "schedule",
        lambda: with_schedule(partial(lr_scheduler.ExponentialLR, gamma=0.9)),
    ),
    "warm-up longer than the run": (
        "schedule",
        lambda: with_schedule(partial(lr_scheduler.LinearLR, start_factor=0.01, total_iters=10_000)),
    ),
    "milestones after the end": (
        "schedule",
        lambda: with_schedule(partial(lr_scheduler.MultiStepLR, milestones=[30_000, 60_000])),
    ),
    "one cycle shorter than the run": (
        "schedule",
        lambda: with_schedule(partial(lr_scheduler.OneCycleLR, max_lr=0.01, total_steps=20)),
    ),
    "learning rate is 0": ("schedule", lambda: classifier(lr=0.0)),
    "labels of the sample before": (  # an off-by-one in a loop over a batch
        "permutation",
        lambda: own(mlp(), lambda model, batch: F.cross_entropy(model(batch[0]), batch[1].roll(1))),
    ),
    "convolution sees the next element": (  # forum: causal convolutions are padded on the left
        "causality",
        lambda: own(
            Own(
                lambda m, ids: m.head(m.conv(m.embedding(ids).transpose(1, 2)).transpose(1, 2)),
                embedding=nn.Embedding(WORDS, 16),
                conv=nn.Conv1d(16, 16, 3, padding=1),
                head=nn.Linear(16, WORDS),
            ),
            next_token,
            TensorDataset(tokens()),
        ),
    ),
    "label is encoded in the inputs": (  # Kapoor and Narayanan (2023)
        "data",
        lambda: classifier(
            mlp(inputs=15),
            data=TensorDataset(
                torch.cat([features(), F.one_hot(labelled().tensors[1], 5).float()], 1), labelled().tensors[1]
            ),
        ),
    ),
    "cosine that begins again and again": (  # T_max in epochs, over many epochs
        "schedule",
        lambda: with_schedule(partial(lr_scheduler.CosineAnnealingLR, T_max=20), num_epochs=20),
    ),
    "dropout layer made in forward": (  # forum: it is always in training mode
        "determinism",
        lambda: classifier(Own(lambda m, x: m.body(nn.Dropout(0.2)(x)), body=mlp())),
    ),
    "loss made from a number": (  # .item() in the loss
        "gradients",
        lambda: own(
            mlp(), lambda model, b: torch.tensor(F.cross_entropy(model(b[0]), b[1]).item(), requires_grad=True)
        ),
    ),
    "encoder under no_grad": (
        "gradients",
        lambda: classifier(
            Own(lambda m, x: m.head(torch.no_grad()(m.body)(x).relu()), body=nn.Linear(10, 16), head=nn.Linear(16, 5))
        ),
    ),
    "loss weights the first sample only": (  # an index in place of a slice
        "permutation",
        lambda: own(mlp(), lambda model, batch: F.cross_entropy(model(batch[0])[:1], batch[1][:1])),
    ),
    "divided by a fixed batch size": (
        "mean_loss",
        lambda: classifier(loss=lambda a, b: F.cross_entropy(a, b, reduction="sum") / 32),
    ),
    "last element of padded sequences": (  # the documentation of pack_padded_sequence
        "padding",
        lambda: of_sentences(lambda m, x, mask: m.rnn(x)[0][:, -1], rnn=nn.GRU(16, 16, batch_first=True)),
    ),
    "step is forgotten": ("learns", lambda: classifier(kind=NeverSteps)),
    "softmax of a single value": (
        "inputs_matter",
        lambda: classifier(Own(lambda m, x: m.head(x.sum(1, keepdim=True).softmax(1)), head=nn.Linear(1, CLASSES))),
    ),
    "batch norm without running statistics": (
        "batch_independence",
        lambda: classifier(dropping(nn.BatchNorm1d(32, track_running_stats=False))),
    ),
    "predictions in place of the targets": (  # a variable of the same name
        "targets_matter",
        lambda: own(mlp(), lambda model, batch: F.cross_entropy(logits := model(batch[0]), logits.argmax(1))),
    ),
    "rounded predictions in place of the targets": (
        "targets_matter",
        lambda: regressor(
            loss=lambda outputs, targets: F.binary_cross_entropy_with_logits(outputs, (outputs > 0).float())
        ),
    ),
    "targets of the batch before": ("targets_matter", lambda: classifier(kind=TargetsOfBefore)),
    "loss_func ignores the targets": (
        "targets_matter",
        lambda: regressor(loss=lambda outputs, targets: outputs.square().mean()),
    ),
    "predictions in place of the targets in evaluations": (
        "targets_matter",
        lambda: classifier(kind=EvaluatesItself, eval_dataset=labelled(seed=1)),
    ),
    "loss without parameters": (
        "runs",
        lambda: own(mlp(), lambda model, batch: F.cross_entropy(model(batch[0]).detach(), batch[1])),
    ),
}
