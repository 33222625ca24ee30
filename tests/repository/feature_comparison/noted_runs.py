"""Runs whose methods and events are noted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from torch.optim.lr_scheduler import StepLR

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.run.events import EVENTS
from tests.small_models import listener, make_trainer, train

HERE = {"num_workers": 0, "shuffle": False}


class Noted(Trainer):
    """Records the calls of its methods, and some of their arguments."""

    calls: Any = None
    seen: Any = None

    def calculate_train_batch_loss(self, batch):
        return super().calculate_train_batch_loss(batch) | {"mine": 7}

    def calculate_eval_batch_loss(self, batch):
        output = super().calculate_eval_batch_loss(batch)
        self.seen["needs gradients"] = output["loss"].requires_grad
        return output

    def train_epoch_end(self):
        self.seen["recorded before"] = "train_loss_epoch" in self.run_history.get_metric_names()


METHODS = [
    "training_run_start",
    "train_epoch_start",
    "calculate_train_batch_loss",
    "backward_step",
    "optimizer_step",
    "scheduler_step",
    "optimizer_zero_grad",
    "train_epoch_end",
    "eval_epoch_start",
    "calculate_eval_batch_loss",
    "eval_epoch_end",
    "training_run_epoch_end",
    "training_run_end",
    "evaluation_run_start",
    "evaluation_run_end",
]


def noted(name: str) -> Callable[..., Any]:
    def method(self: Trainer, *args: Any) -> Any:
        self.calls.append(name)  # type: ignore[attr-defined]
        return getattr(Noted, name)(self, *args)

    return method


Follows = type("Follows", (Noted,), {name: noted(name) for name in METHODS})


def note_event(event: str) -> Callable[..., None]:
    def note(trainer: Any, **kwargs: Any) -> None:
        if trainer.calls is None:
            trainer.calls, trainer.seen = [], {}
        trainer.calls.append(event)
        trainer.seen[event] = kwargs
        if event == "on_training_run_epoch_end":
            trainer.seen.setdefault("epochs", []).append(trainer.run_history.current_epoch)
        if event == "on_train_epoch_end":
            trainer.seen["mean"] = trainer._loss_tracker.average

    return note


def run_noted() -> Any:
    trainer = make_trainer([listener(**{event: note_event(event) for event in EVENTS})], trainer_class=Follows)
    schedule = {"create_scheduler_fn": partial(StepLR, step_size=100)}
    return train(trainer, 2, eval_dataset=True, gradient_accumulation_steps=2, **schedule)


@contextmanager
def said(match: str) -> Iterator[None]:
    with pytest.warns(UserWarning, match=match):
        yield
