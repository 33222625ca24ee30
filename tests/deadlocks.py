"""A short training on two ranks in which rank 1 alone does something, such as a call that waits for the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pytorch_accel_lite import Trainer
from tests.ranks import rank
from tests.small_models import float64_data, float64_model, listener

DATA = float64_data(16)
HOW: dict[str, Any] = {"num_epochs": 2, "per_device_batch_size": 2}


def on_rank_1(event: str, action: Callable[[Any], Any], update: int = 0) -> Any:
    """A callback that calls something on rank 1 alone, after an update."""
    is_due = lambda trainer: rank() == 1 and trainer.progress.update >= update  # noqa: E731
    return listener(**{event: lambda trainer, **_: action(trainer) if is_due(trainer) else None})


def train(model: nn.Module | None = None, kind: type[Trainer] = Trainer, callbacks: Any = ()) -> None:
    model = float64_model() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    kind(model, nn.MSELoss(), optimizer, callbacks=callbacks, seed=0).train(DATA, **HOW)


def fails_on_rank_1(trainer: Any) -> None:
    raise OSError("no disk")
