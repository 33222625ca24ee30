"""Parts that the tests' experiments name by path: a model, data, optimizers, callbacks, trainers."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset
from torchmetrics import MeanAbsoluteError

from pytorch_accel_lite import StopTrainingError, Trainer, TrainerCallback
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback


class Net(nn.Module):
    """A small network.

    Args:
        width: number of hidden units
        activation: the activation between the layers; ReLU by default
        dropout: the probability that a hidden unit is dropped out

    Attributes:
        layers: the layers, in order
    """

    def __init__(self, width: int = 8, activation: nn.Module | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        parts = [nn.Linear(4, width), activation or nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, 1)]
        self.layers = nn.Sequential(*parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def create_model(width, **kwargs):
    """A function without annotations, with undocumented arguments."""
    return Net(width, **kwargs)


def create_sized(sizes: list[int], options: dict[str, int] | None = None, **kwargs: Any):
    """A function with ``**kwargs`` that its signature and body do not resolve."""
    further = dict(kwargs)
    return Net(*sizes, **further)


def load_data(size: int = 24, noise: float = 0.1):
    x = torch.randn(size, 4)
    return TensorDataset(x, x.sum(1, keepdim=True) + noise * torch.randn(size, 1))


def load_two():
    return {"near": load_data(8), "far": load_data(5)}


def create_optimizer(model, lr: float = 0.1):
    return torch.optim.SGD([{"params": list(model.parameters())}], lr=lr)


def weighted_mse(outputs, targets, weight: float = 1.0):
    return weight * ((outputs - targets) ** 2).mean()


def create_with(width: int = 2, activation=nn.Sequential(nn.Tanh(), nn.Hardtanh()), scale=lambda x: x):  # noqa: B008
    """A function with defaults that cannot be written to a file."""
    return Net(width, activation)


def create_by(activation: Callable[..., nn.Module] = nn.ReLU):
    return Net(3, activation())


def create_numbered(options: dict[int, int]):
    return Net(options[1] + options[2])


MADE = partial(Net, width=3)


def anything(x):
    return [x]


def load_named(names: list[str]):
    return names


def as_zeros(samples: list[Any]) -> list[torch.Tensor]:
    return [torch.zeros(len(samples), len(part)) for part in samples[0]]


def half(update: int) -> float:
    return 0.5**update


def fails(size: int = 1):
    raise KeyError("no such split")


NOT_A_CLASS = 3


class StopAt(TrainerCallback):
    def __init__(self, update: int, folder: Path | None = Path("stopped")) -> None:
        self.update = update
        self.folder = folder

    def on_train_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        if trainer.progress.update == self.update:
            raise StopTrainingError("enough")


class CrashAt(TrainerCallback):
    def __init__(self, update: int) -> None:
        self.update = update

    def on_train_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        if trainer.progress.update == self.update:
            raise ZeroDivisionError


class InterruptAt(CrashAt):
    """Sends the signal of Ctrl-C."""

    def on_train_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        if trainer.progress.update == self.update:
            os.kill(os.getpid(), signal.SIGINT)


class OwnTrainer(Trainer):
    """Makes its own model and optimizer, as the trainer of a GAN does."""

    def __init__(self, width: int = 3, **kwargs: Any) -> None:
        model = Net(width)
        super().__init__(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), **kwargs)


class ScaledTrainer(Trainer):
    """Predicts multiples of what its model does."""

    scale = 1.0

    def calculate_predict_batch_output(self, batch: Any) -> torch.Tensor:
        return self.scale * super().calculate_predict_batch_output(batch)


def absolute_error(outputs, targets):
    """A value for each sample, as a list, as functions on texts return."""
    return (outputs - targets).abs().flatten().tolist()


class KillAt(TrainerCallback):
    """Kills the process in its n-th step.

    Each process that resumes starts counting again.
    """

    saves_attributes = False

    def __init__(self, step: int) -> None:
        self.left = step

    def on_predict_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    on_eval_step_end = on_train_step_end = on_predict_step_end


# -------------------------------------------------------------------- settings that are compared under seeds

DATA = TensorDataset(torch.arange(48.0).view(12, 4).sin(), torch.arange(12.0).view(12, 1).cos())
TRAINING = {"train_dataset": DATA, "num_epochs": 2, "eval_dataset": DATA, "per_device_batch_size": 4}


def make(lr: float, seed: int, folder: Path, *callbacks: Any) -> tuple[Trainer, dict[str, Any]]:
    from pytorch_accel_lite.callbacks import MetricsCallback

    model = Net(dropout=0.1)
    metrics = MetricsCallback({"error": MeanAbsoluteError()})
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return Trainer(model, nn.MSELoss(), optimizer, [metrics, *callbacks], seed=seed), TRAINING


def saving(seed: int, folder: Path, *callbacks: Any) -> tuple[Trainer, dict[str, Any]]:
    return make(0.05, seed, folder, SaveTrainingStateCallback(folder / "states", save_every_n_steps=1), *callbacks)


def on_gpu(seed: int, folder: Path) -> tuple[Trainer, dict[str, Any]]:
    (folder / "gpu").write_text(os.environ["CUDA_VISIBLE_DEVICES"])
    print("on", os.environ["CUDA_VISIBLE_DEVICES"])
    return make(0.01, seed, folder, *([KillAt(2)] if "KILLS" in os.environ else []))
