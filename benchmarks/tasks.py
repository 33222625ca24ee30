"""The models, data and sizes that all contenders train."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset


@dataclass(frozen=True)
class Task:
    """A model, an optimizer, data, and the number of updates.

    Args:
        ready: give contenders a list of prepared batches instead of the dataset
    """

    make_model: Callable[[], nn.Module]
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    dataset: Dataset[Any]
    batch_size: int
    steps: int
    ready: bool

    @property
    def loss_func(self) -> nn.Module:
        return nn.CrossEntropyLoss()

    def batches(self) -> list[Any]:
        tensors = self.dataset.tensors  # type: ignore[attr-defined]
        ends = range(0, self.batch_size * self.steps, self.batch_size)
        return [tuple(tensor[i : i + self.batch_size] for tensor in tensors) for i in ends]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def make_mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def make_convnet() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after in ((3, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 2 * 2, 10))


class Transformer(nn.Module):
    """A byte-level language model of 10 million parameters; the loss is over (batch * length) predictions."""

    def __init__(self, width: int = 384, depth: int = 6, length: int = 64) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, 6, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(x) + self.positions.weight[: x.shape[1]]
        return self.head(self.layers(hidden, mask=self.mask, is_causal=True)).transpose(1, 2)


def make_transformer(depth: int = 6) -> nn.Module:
    torch.manual_seed(0)
    return Transformer(depth=depth)


def random_data(samples: int, *shape: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(samples, *shape, generator=generator), torch.randint(10, (samples,), generator=generator)
    )


def text_data(samples: int, length: int = 64) -> TensorDataset:
    """Return the source code of Python's standard library as bytes, with the next byte as the target."""
    text, files = b"", sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    while len(text) <= samples * length:
        text += files.pop().read_bytes()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)[: samples * length + 1].long()
    return TensorDataset(data[:-1].reshape(samples, length), data[1:].reshape(samples, length))


def text_task(batch_size: int, steps: int, depth: int = 6) -> Task:
    """Return the task of training the transformer on text."""
    model = partial(make_transformer, depth)
    return Task(model, adamw, text_data(batch_size * steps), batch_size, steps, ready=True)


def make_task(workload: str, quick: bool = False) -> Task:
    """Return the task of a workload.

    Args:
        quick: use a few steps only, and a small transformer, to check that everything works
    """
    if workload == "convnet":
        steps = 5 if quick else 500
        return Task(make_convnet, sgd, random_data(32 * steps, 3, 16, 16), 32, steps, ready=True)
    if workload == "transformer":
        return text_task(1, steps=4, depth=1) if quick else text_task(8, steps=10)
    steps = 1 if workload == "first" else 20 if quick else 2000
    return Task(make_mlp, sgd, random_data(32 * steps, 64), 32, steps, ready=workload != "tensors")
