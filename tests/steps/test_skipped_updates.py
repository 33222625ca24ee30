"""Skipped updates: each kind of step counts them once, whether a callback or the gradient scaler skips them."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch

from pytorch_accel_lite import Trainer
from tests.kinds_of_steps import KINDS, OWNERS
from tests.small_models import Overflows, equal_weights, listener, make_data, make_trainer, train, weights

WITHOUT_SCALER = ("LBFGS", "recomputed gradients")
EACH_KIND = pytest.mark.parametrize(
    "kind",
    [pytest.param(name, marks=pytest.mark.extension(*OWNERS.get(name, ()))) for name in KINDS if name != "sharded"],
)


def overflow(trainer: Any, **kwargs: Any) -> None:
    """Make the gradients of the first update infinite."""
    if trainer.progress.update == 0:
        for parameter in trainer.model.parameters():
            if parameter.grad is not None:
                parameter.grad.fill_(torch.inf)


def skip_second(trainer: Any) -> None:
    if trainer.progress.update == 1:
        trainer.skip_update()


def train_on(kind: str, *callbacks: Any) -> Any:
    trainer = KINDS[kind].make([*callbacks])
    data = KINDS[kind].how.get("train_dataset", make_data(8))
    return train(trainer, 2, **{"train_dataset": data, "eval_dataset": data, "batch_size": 2} | KINDS[kind].how)


def counts(kind: str, *events: Any) -> list[int]:
    """The number of skipped updates after each update of a run with a kind of step."""
    found: list[int] = []
    see = listener(on_optimizer_step_end=lambda trainer: found.append(trainer.run.training_step.skipped_updates))
    trainer = train_on(kind, *events, see)
    assert len(found) == trainer.progress.update
    return found


@EACH_KIND
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


@pytest.mark.sampled
@pytest.mark.parametrize("event", ["on_train_step_start", "on_backward_end", "on_optimizer_step_end", "on_update_end"])
@EACH_KIND
def test_skipping_outside_of_an_update_is_an_error(kind, event):
    """In some kinds of steps, an error in the backward pass is that of a failed batch."""
    if event == "on_backward_end" and kind.startswith("skipped"):
        return
    skip = listener(**{event: lambda trainer, **_: trainer.skip_update()})
    with pytest.raises(RuntimeError, match=r"skip_update\(\) .* Call it in a callback's on_optimizer_step_start"):
        train_on(kind, skip)


@pytest.mark.extension("manual_optimization")
@pytest.mark.parametrize("place", ["before", "after"])
def test_skipping_in_train_step_is_an_error(place):
    class Skips(Trainer):
        def train_step(self, batch):
            if place == "before":
                self.skip_update()
            self.update(self.calculate_train_batch_loss(batch)["loss"])
            self.skip_update()

    with pytest.raises(RuntimeError, match=r"skip_update\(\)"):
        train(make_trainer(trainer_class=Skips))


def test_skipping_outside_of_a_run_is_an_error():
    trainer = make_trainer()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"skip_update\(\)"):
            trainer.skip_update()
        train(trainer)


class SkipsInStep(Trainer):
    def optimizer_step(self):
        self.skip_update()


class SkipsInClipping(Trainer):
    def clip_gradients(self):
        super().clip_gradients()
        self.skip_update()


@pytest.mark.parametrize("trainer_class", [SkipsInStep, SkipsInClipping])
@pytest.mark.parametrize("is_manual", [False, pytest.param(True, marks=pytest.mark.extension("manual_optimization"))])
def test_overridden_methods_of_an_update_may_skip_it(trainer_class, is_manual):
    def train_step(self: Trainer, batch: Any) -> None:
        self.update(self.calculate_train_batch_loss(batch)["loss"])

    trainer = make_trainer(trainer_class=type("Own", (trainer_class,), {"train_step": train_step} if is_manual else {}))
    before = weights(trainer.model)
    schedule = partial(torch.optim.lr_scheduler.StepLR, step_size=1)
    train(trainer, create_scheduler_fn=schedule)
    assert trainer.run.training_step.skipped_updates == trainer.progress.update > 0
    assert equal_weights(before, weights(trainer.model))
    assert trainer.scheduler.last_epoch == 0


@pytest.mark.parametrize("limit", [None, 1.0])
@pytest.mark.parametrize("is_heard", [True, False])
def test_the_scaler_is_ready_after_an_override_skipped(limit, is_heard, scaled_accelerator):
    """It has unscaled the gradients of the skipped update, to clip them or for a callback, or not at all."""

    class SkipsFirst(Trainer):
        def optimizer_step(self):
            if self.progress.update == 0:
                self.skip_update()
            else:
                super().optimizer_step()

    skip = listener(on_optimizer_step_start=lambda trainer: trainer.progress.update or trainer.skip_update())
    expected = train(make_trainer([skip], accelerator=scaled_accelerator), 2, gradient_clip_norm=limit)
    heard = [listener(on_optimizer_step_start=lambda trainer: None)] if is_heard else []
    trainer = make_trainer(heard, trainer_class=SkipsFirst, accelerator=scaled_accelerator)
    train(trainer, 2, gradient_clip_norm=limit)
    assert trainer.run.training_step.skipped_updates == expected.run.training_step.skipped_updates == 1
    assert equal_weights(weights(trainer.model), weights(expected.model))
    assert scaled_accelerator.scaler.state_dict()["_growth_tracker"] == 2 * trainer.progress.update


def test_an_override_may_call_an_overflow_skipped_itself(scaled_accelerator):
    class Tells(Overflows):
        def optimizer_step(self):
            super().optimizer_step()
            if self.accelerator.optimizer_step_was_skipped:
                self.skip_update()

    trainer = train(make_trainer(trainer_class=Tells, accelerator=scaled_accelerator))
    assert trainer.run.training_step.skipped_updates == 1
    assert scaled_accelerator.scaler.get_scale() == 2.0**9


@pytest.mark.extension("tuning")
def test_the_batch_size_is_found_where_an_override_skips():
    assert make_trainer(trainer_class=SkipsInStep).find_batch_size(make_data(16), max_batch_size=4) == 4


@pytest.mark.parametrize("reads_norm", [True, False])
def test_a_skipped_update_that_overflows_lowers_the_scale(reads_norm, scaled_accelerator):
    """As one that the scaler skips by itself; whether or not the gradients were unscaled to compute their norm."""

    def skip(trainer: Trainer) -> None:
        if trainer.progress.update == 1:
            assert not reads_norm or not math.isfinite(trainer.gradient_norm)
            trainer.skip_update()

    callbacks = [listener(on_optimizer_step_start=skip)]
    trainer = train(make_trainer(callbacks, trainer_class=Overflows, accelerator=scaled_accelerator))
    assert trainer.run.training_step.skipped_updates == 1
    assert scaled_accelerator.scaler.get_scale() == 2.0**9


def test_an_update_without_gradients_is_skipped_beside_a_scaler(scaled_accelerator):
    def skip(trainer: Trainer) -> None:
        trainer.optimizer.zero_grad()
        trainer.skip_update()

    trainer = train(make_trainer([listener(on_optimizer_step_start=skip)], accelerator=scaled_accelerator))
    assert trainer.run.training_step.skipped_updates == 3
    assert scaled_accelerator.scaler.get_scale() == 2.0**10


def test_an_error_of_the_device_in_unscaling_is_raised(scaled_accelerator, monkeypatch):
    def fail(*_: Any) -> None:
        raise RuntimeError("an error of the device")

    monkeypatch.setattr(scaled_accelerator.scaler, "_unscale_grads_", fail)
    skip = listener(on_optimizer_step_start=lambda trainer: trainer.skip_update())
    with pytest.raises(RuntimeError, match="an error of the device"):
        train(make_trainer([skip], accelerator=scaled_accelerator))
