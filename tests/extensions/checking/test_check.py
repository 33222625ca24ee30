"""check(): each mistake is found by its check, and correct programs pass."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterable
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.utils.data import ConcatDataset, DataLoader, Dataset, RandomSampler, Subset, TensorDataset

from pytorch_accel_lite import Trainer, TrainerCallback, TrainerPlaceholderValues
from pytorch_accel_lite.checking import ProgramError, doubt
from pytorch_accel_lite.data import OwnShard
from tests.launching import some_of
from tests.small_models import Stream, adamw_trainer, float64_data, float64_model, same_bits

CLASSES, WORDS, PAD = 5, 20, 0
#: A trainer, its data, and arguments of train().
Program = tuple[Trainer, Any, dict[str, Any]]


# ------------------------------------------------------------------------------------------ parts of programs


class Own(nn.Module):
    """A model of some parts, whose forward pass is a function of it and its input."""

    def __init__(self, function: Callable[[Any, torch.Tensor], Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.function(self, x)


class OwnTrainer(Trainer):
    """Computes the loss of a batch by a function of the model and the batch, in training and in evaluation."""

    def __init__(self, model, function, lr=0.01, **kwargs):
        super().__init__(model, None, torch.optim.AdamW(model.parameters(), lr=lr), callbacks=[], **kwargs)
        self.function = function

    def calculate_train_batch_loss(self, batch):
        found = self.function(self.model, batch)
        return found if isinstance(found, dict) else {"loss": found}

    calculate_eval_batch_loss = calculate_train_batch_loss


def features(size=200, width=10, seed=0):
    return torch.randn(size, width, generator=torch.Generator().manual_seed(seed))


def labelled(size=200, seed=0):
    x = features(size, seed=seed)
    return TensorDataset(x, x[:, :CLASSES].argmax(1))


def regression(column=True, seed=0):
    x = features(seed=seed)
    return TensorDataset(x, x.sin().sum(1, keepdim=column))


def mlp(outputs=CLASSES, *last, inputs=10):
    return nn.Sequential(nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, outputs), *last)


def dropping(*more):
    return nn.Sequential(nn.Linear(10, 32), *more, nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, CLASSES))


def classifier(
    model=None, loss=None, data=None, lr=0.01, optimizer=None, kind=Trainer, options=None, **arguments
) -> Program:
    """Return a program that classifies, by default ``labelled()``."""
    model = mlp() if model is None else model
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=lr)
    trainer = kind(model, loss or nn.CrossEntropyLoss(), optimizer, **{"callbacks": [], **(options or {})})
    return trainer, labelled() if data is None else data, arguments


def regressor(model=None, loss=None, data=None, **kwargs) -> Program:
    data = regression() if data is None else data
    return classifier(mlp(1) if model is None else model, loss or nn.MSELoss(), data, **kwargs)


def own(model, function, data=None, **kwargs) -> Program:
    """Return a program whose step is a function of the model and the batch."""
    return OwnTrainer(model, function, **kwargs), labelled() if data is None else data, {}


def tokens(size=64, length=12):
    return torch.randint(1, WORDS, (size, length), generator=torch.Generator().manual_seed(0))


def padded_tokens():
    ids = tokens()
    ids[::2, 4:] = PAD
    return ids


class SequenceModel(nn.Module):
    """A transformer block over tokens."""

    def __init__(self, causal=True, dropout=0.0):
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, 16), nn.Linear(16, WORDS)
        self.positions = nn.Parameter(0.02 * torch.randn(64, 16))
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.dropout, self.causal = nn.Dropout(dropout), causal

    def forward(self, ids):
        length = ids.shape[1]
        x = self.embedding(ids) + self.positions[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length) if self.causal else None
        x = x + self.attention(x, x, x, attn_mask=mask, is_causal=self.causal, need_weights=False)[0]
        return self.head(self.dropout(x))


def next_token(model, batch, shift=1):
    (ids,) = batch
    logits = model(ids[:, : ids.shape[1] - shift])
    return {"loss": F.cross_entropy(logits.flatten(0, 1), ids[:, shift:].flatten()), "model_outputs": logits}


def shifted_twice(model, batch):
    (ids,) = batch
    logits, labels = model(ids[:, :-1]), ids[:, 1:]
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def known_tokens(model, batch, counts=True):
    logits, targets = model(batch[:, :-1]), batch[:, 1:].masked_fill(batch[:, 1:] == PAD, -100)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    return {"loss": loss, **({"num_items_in_batch": (targets != -100).sum()} if counts else {})}


def sentences(classes=2):
    lengths = torch.randint(3, 10, (64,), generator=torch.Generator().manual_seed(3)).tolist()
    rows = zip(tokens(), lengths, strict=True)
    return [{"ids": row[:length], "label": int(row[0]) % classes} for row, length in rows]


def pad_collate(samples, tags=False):
    ids = nn.utils.rnn.pad_sequence([sample["ids"] for sample in samples], batch_first=True, padding_value=PAD)
    labels = torch.tensor([sample["label"] for sample in samples])
    return {"ids": ids, "mask": (ids != PAD).long(), "labels": ids % 3 if tags else labels}


class OfSentences(nn.Module):
    """Classifies sentences, or each of their words, by a function of the model, the embedded words and the mask."""

    def __init__(self, function, outputs=2, **parts):
        super().__init__()
        self.embedding, self.head, self.function = nn.Embedding(WORDS, 16), nn.Linear(16, outputs), function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, ids, mask):
        return self.head(self.function(self, self.embedding(ids), mask[..., None].float()))


def of_sentences(function, tags=False, **parts) -> Program:
    model = OfSentences(function, 3 if tags else 2, **parts)
    loss = (lambda outputs, labels: F.cross_entropy(outputs.transpose(1, 2), labels)) if tags else None
    return classifier(model, loss, sentences(), collate_fn=partial(pad_collate, tags=tags))


def series(width=4):
    x = torch.randn(64, 6, width)
    return TensorDataset(x, (x.sum((1, 2)) > 0).long())


class Images(Dataset):
    """Images that may be augmented."""

    def __init__(self, augment=None):
        self.images = torch.rand(64, 1, 8, 8, generator=torch.Generator().manual_seed(1))
        self.labels = self.images[:, 0, :2, :2].flatten(1).argmax(1)
        self.augment = augment

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index]
        return (image if self.augment is None else self.augment(image)), self.labels[index]


def jitter(image):
    return image + 0.1 * torch.randn_like(image)


def convnet(*norm):
    return nn.Sequential(nn.Conv2d(1, 8, 3), *norm, nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))


def of_images(data, **arguments) -> Program:
    return classifier(convnet(), None, data, **arguments)


def with_schedule(create, **kwargs) -> Program:
    return classifier(data=labelled(208), create_scheduler_fn=create, **{"num_epochs": 10, **kwargs})


# -------------------------------------------------------------------------------------------- wrong programs


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


def scaled(model, factor):
    with torch.no_grad():
        model[2].weight.mul_(factor)
    return model


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


def rnn(**kwargs):
    return {"rnn": nn.GRU(4, 16, **kwargs), "head": nn.Linear(16, 2)}


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

# -------------------------------------------------------------------------------------------- right programs


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

# --------------------------------------------------------------------------------------------------- tests

pytestmark = pytest.mark.usefixtures("no_accelerator")  # some programs compute in bfloat16


def needing_logical(names: Iterable[str], *few: str) -> list[Any]:
    """Names of programs, of which a few need an extension."""
    return [pytest.param(name, marks=pytest.mark.extension("logical")) if name in few else name for name in names]


def check(program: Program, **arguments: Any) -> Any:
    trainer, data, own_arguments = program
    return trainer.check(data, **{**own_arguments, **arguments})


@pytest.mark.parametrize("name", needing_logical(WRONG, "gradients depend on the processes"))
def test_a_mistake_is_found_by_the_check_that_should_find_it(name):
    torch.manual_seed(0)
    expected, make = WRONG[name]
    found = check(make(), only=[expected])[expected]
    assert found.status in ("failed", "warned"), found
    assert found.message
    assert found.advice


@pytest.mark.soak
@pytest.mark.parametrize("name", some_of(needing_logical(RIGHT, "logical processes")))
def test_correct_programs_pass_and_are_left_unchanged(name):
    torch.manual_seed(0)
    program = RIGHT[name]()
    trainer = program[0]

    def state():
        generators = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
        return copy.deepcopy((trainer.model.state_dict(), trainer.optimizer.state_dict(), generators))

    before = state()
    report = check(program)
    assert report.failures == report.warnings == [], report
    assert len(report.passed) >= 4
    assert same_bits(before, state())
    assert not trainer.is_running
    assert len(trainer.run_history) == 0


@pytest.mark.parametrize(
    "name", ["images, batch norm, dropout, one cycle", "generative adversarial", "callback of one's own"]
)
def test_training_after_a_check_is_unchanged(name):
    def train(checks: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        trainer, data, arguments = program = RIGHT[name]()
        if checks:
            check(program)
        trainer.train(data, **{"num_epochs": 1, **arguments})
        return trainer.model.state_dict()

    assert same_bits(train(checks=True), train(checks=False))


class DrawsNoise(nn.Module):
    """Draws from generators of its own."""

    def __init__(self):
        super().__init__()
        self.body = mlp()
        self.generators = torch.Generator(), np.random.default_rng(0), np.random.RandomState(0), random.Random(0)
        self.first, self.second, self.third, self.fourth = self.generators

    def forward(self, x):
        drawn = self.second.normal(), self.third.rand(), self.fourth.random()
        return self.body(x + 0.01 * torch.randn(x.shape, generator=self.first) + 0.01 * sum(drawn))


def test_custom_generators_are_restored():
    model, loading, order = DrawsNoise(), torch.Generator(), torch.Generator()
    data = labelled(64)
    loader = DataLoader(data, batch_size=8, sampler=RandomSampler(data, generator=order), generator=loading)
    ways = (model.generators[0].get_state, lambda: model.second.bit_generator.state, model.third.get_state)
    states = [*ways, model.fourth.getstate, loading.get_state, order.get_state]
    before = [str(state()) for state in states]
    torch_before = [generator.get_state() for generator in (model.first, loading, order)]
    trainer, _, _ = classifier(model)
    assert trainer.check(loader).ok
    assert [str(state()) for state in states] == before
    after = [generator.get_state() for generator in (model.first, loading, order)]
    assert all(map(torch.equal, after, torch_before))


def test_a_check_report_shows_findings_and_advice():
    program = WRONG["softmax before cross entropy"][1]()
    report = check(program, only=["initial_loss", "precision", "schedule", "broadcast"])
    assert [result.name for result in report.results] == ["broadcast", "initial_loss", "schedule", "precision"]
    assert not report.ok
    (failure,) = report.failures
    assert report["initial_loss"] is failure
    assert [result.name for result in report.passed] == ["broadcast"]
    assert [result.name for result in report.not_applicable] == ["schedule", "precision"]
    lines = repr(report).splitlines()
    assert lines[:3] == [
        "Checks: 1 failed, 1 passed, 2 not applicable",
        "  broadcast     passed",
        "  initial_loss  failed",
    ]
    assert "  precision     not applicable: The program does not use mixed precision." in lines
    assert "- initial_loss failed: cross_entropy is given probabilities, and applies a softmax or" in repr(report)
    assert "    To change: Give it logits: remove the last function of the model." in lines
    assert "cross_entropy is given probabilities" in report._repr_html_()
    with pytest.raises(KeyError, match="no check 'padding', only broadcast"):
        report["padding"]


def test_details_name_parameters_and_samples():
    report = check(WRONG["detached features"][1](), only=["gradients"])
    assert report["gradients"].details["parameters"] == ["body.weight", "body.bias"]
    report = check(WRONG["NaN in a sample"][1](), only=["data"])
    assert report["data"].details["samples"] == [137]
    report = check(WRONG["statistics are no buffers"][1](), only=["reload"])
    assert report["reload"].details["lost"] == ["mean"]
    report = check(RIGHT["classifier"](), only=["learns"])
    assert report["learns"].details["shuffled"] > report["learns"].details["after"]


def test_a_failed_check_raises_an_error_if_strict():
    with pytest.raises(ProgramError, match="would be broadcast") as caught:
        check(WRONG["mse of a column and a row"][1](), only=["broadcast"], strict=True)
    assert caught.value.report["broadcast"].status == "failed"
    assert check(RIGHT["regression"](), only=["broadcast"], strict=True).ok


def test_checks_can_be_left_out_and_added():
    def check_width(probe):
        """Look at the model's outputs.

        They should be wide.

        Add some.
        """
        width = probe.evaluate(probe.eval_batch).outputs[0].shape[1]
        if width < 100:
            yield doubt(f"There are {width} outputs.", width=width)

    report = check(RIGHT["classifier"](), skip=["learns", "leakage"], extra=[check_width])
    assert {"learns", "leakage"}.isdisjoint(result.name for result in report.results)
    found = report["width"]
    assert (found.status, found.details, found.advice) == ("warned", {"width": CLASSES}, "Add some.")
    assert report.ok


def test_callbacks_that_fail_outside_of_a_run_are_named():
    report = check(RIGHT["callback of one's own"](), only=["runs"])
    assert "Clips could not be tried outside of a run: AttributeError" in report["runs"].message


def test_checks_skipped_for_lack_of_time_are_reported():
    report = check(RIGHT["classifier"](), seconds=1e-9)
    assert {result.message for result in report.not_applicable} == {"left out after 1e-09 seconds"}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"only": ["gradient"]}, ValueError, "only=.*there are the checks runs, broadcast"),
        ({"skip": "learns"}, ValueError, "skip='learns'.*Pass a list"),
        ({"seconds": 0}, ValueError, "seconds=0 must be"),
        ({"epochs": 3}, TypeError, "no argument 'epochs': it is called num_epochs"),
    ],
)
def test_check_refuses_unknown_checks_and_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        check(RIGHT["classifier"](), **arguments)


def test_check_accepts_arguments_of_train():
    arguments = {"num_epochs": 2, "eval_every_n_epochs": 2, "gradient_clip_norm": 1.0}
    assert check(RIGHT["classifier"](), only=["gradients"], **arguments).ok


def test_a_loader_without_batches_is_reported():
    data = float64_data(16)
    loader = DataLoader(data, batch_size=None)
    report = adamw_trainer(float64_model()).check(loader, only=["runs"])
    assert "it takes each item of the dataset for a whole batch" in report["runs"].message
    assert report["runs"].status == "warned"
    batches = DataLoader([data[i : i + 4] for i in range(0, 16, 4)], batch_size=None)
    assert adamw_trainer(float64_model()).check(batches, only=["runs"])["runs"].status == "passed"
