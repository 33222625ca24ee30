"""Skipped updates: each kind of step counts them once, whether a callback or the gradient scaler skips them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from pytorch_accel_lite import Trainer
from tests.run.test_events import KINDS, OWNERS
from tests.small_models import Overflows, listener, make_data, make_trainer, train

WITHOUT_SCALER = ("LBFGS", "recomputed gradients")


def overflow(trainer: Any, **kwargs: Any) -> None:
    """Make the gradients of the first update infinite."""
    if trainer.progress.update == 0:
        for parameter in trainer.model.parameters():
            if parameter.grad is not None:
                parameter.grad.fill_(torch.inf)


def skip_second(trainer: Any) -> None:
    if trainer.progress.update == 1:
        trainer.skip_update()


def counts(kind: str, *events: Any) -> list[int]:
    """The number of skipped updates after each update of a run with a kind of step."""
    found: list[int] = []
    see = listener(on_optimizer_step_end=lambda trainer: found.append(trainer.run.stepper.skipped_updates))
    trainer = KINDS[kind].make([*events, see])
    data = KINDS[kind].how.get("train_dataset", make_data(8))
    train(trainer, 2, **{"train_dataset": data, "eval_dataset": data, "batch_size": 2} | KINDS[kind].how)
    assert len(found) == trainer.progress.update
    return found


@pytest.mark.parametrize(
    "kind",
    [pytest.param(name, marks=pytest.mark.extension(*OWNERS.get(name, ()))) for name in KINDS if name != "sharded"],
)
def test_each_kind_of_step_counts_each_skipped_update_once(kind, request, monkeypatch):
    skip = listener(on_optimizer_step_start=skip_second)
    if kind in WITHOUT_SCALER:
        first, *rest = counts(kind, skip)
        assert (first, set(rest)) == (0, {1})
        return
    accelerator = request.getfixturevalue("scaled_accelerator")
    monkeypatch.setattr(Trainer, "_create_accelerator", lambda self: accelerator)
    first, *rest = counts(kind, listener(on_backward_end=overflow), skip)
    assert (first, set(rest)) == (1, {2})


@pytest.mark.parametrize("reads_norm", [True, False])
def test_a_skipped_update_that_overflows_lowers_the_scale(reads_norm, scaled_accelerator):
    """As one that the scaler skips by itself; whether or not the gradients were unscaled to compute their norm."""

    def skip(trainer: Trainer) -> None:
        if trainer.progress.update == 1:
            assert not reads_norm or not math.isfinite(trainer.gradient_norm)
            trainer.skip_update()

    callbacks = [listener(on_optimizer_step_start=skip)]
    trainer = train(make_trainer(callbacks, trainer_class=Overflows, accelerator=scaled_accelerator))
    assert trainer.run.stepper.skipped_updates == 1
    assert scaled_accelerator.scaler.get_scale() == 2.0**9
