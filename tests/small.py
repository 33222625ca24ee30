"""Helpers of the tests of events, callbacks, placeholders, tracking, bad input and checkpoints."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from pytorch_accel_lite import Trainer, TrainerCallback

ROOT = Path(__file__).resolve().parent.parent
EVENTS = [name for name in vars(TrainerCallback) if name.startswith("on_")]


def make_data(size: int = 6) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(size, 4, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True))


def make_model(seed: int = 0, features: int = 4) -> nn.Module:
    """Two linear layers whose weights follow from the seed; the global generator is left alone."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(features, 3), nn.Tanh(), nn.Linear(3, 1))
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5, generator=generator)
    return model


def make_trainer(
    callbacks: Iterable[Any] = (), model: nn.Module | None = None, trainer_class: type[Trainer] = Trainer, **kwargs: Any
) -> Trainer:
    model = make_model() if model is None else model
    kwargs = {"loss_func": nn.MSELoss(), "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)} | kwargs
    return trainer_class(model, callbacks=callbacks, **kwargs)


def train(trainer: Trainer, epochs: int | None = 1, size: int = 6, batch_size: int = 2, **kwargs: Any) -> Trainer:
    """Train on a few samples in order; ``eval_dataset=True`` evaluates on the same."""
    data = kwargs.pop("train_dataset", None) or make_data(size)
    if kwargs.get("eval_dataset") is True:
        kwargs["eval_dataset"] = data
    kwargs.setdefault("train_dataloader_kwargs", {"shuffle": False})
    trainer.train(data, epochs, per_device_batch_size=batch_size, **kwargs)
    return trainer


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def listener(**methods: Callable[..., Any]) -> TrainerCallback:
    """A callback that calls ``method(trainer)``, or ``method(trainer, **kwargs)``, at the named events."""

    def event(method: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, trainer, **kwargs: method(trainer, **kwargs)

    return type("Listener", (TrainerCallback,), {name: event(method) for name, method in methods.items()})()


class CountsReads(TorchDispatchMode):
    """Counts how often a number is read from a tensor."""

    reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.reads += 1
        return func(*args, **(kwargs or {}))


class Stream(IterableDataset[Any]):
    """Samples without a length."""

    def __init__(self, size: int = 6) -> None:
        self.data = make_data(size)

    def __iter__(self) -> Any:
        return (self.data[i] for i in range(len(self.data)))


class Broken(Dataset[Any]):
    """A dataset with a sample that cannot be read."""

    def __init__(self, size: int = 6, broken: int = 4) -> None:
        self.data = make_data(size)
        self.broken = broken

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        if index == self.broken:
            raise OSError(f"scan {index} is unreadable")
        return self.data[index]


def run_python(script: str, *arguments: str) -> str:
    """Run a script in a fresh interpreter and return what it printed."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], env=env, text=True, capture_output=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
