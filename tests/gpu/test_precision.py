"""A run equals a hand-written loop bit for bit in each precision, with deterministic kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

from benchmarks.gpu import on_side_stream
from pytorch_accel_lite import Trainer, callbacks
from pytorch_accel_lite.data import OwnShard
from tests.gpu.parts import (
    DEVICE,
    ON_GPU,
    SCALE,
    Task,
    adamw,
    clone,
    deterministic,
    fit,
    in_precision,
    on_device,
    plain_loop,
    same_weights,
    sgd,
    sized,
    trainer_of,
)
from tests.small_models import listener

STEPS = sized(20, 3)
PRECISIONS = ["no", "bf16", "fp16"]


def loop_by_hand(task: Task, precision: str, make: Any = adamw, steps: int = STEPS, **kwargs: Any) -> Any:
    """The model that the plain loop has trained."""
    model = task.model().to(DEVICE)
    optimizer = make(model)
    if "rate_falls" in kwargs:
        kwargs["schedule"] = StepLR(optimizer, step_size=1, gamma=kwargs.pop("rate_falls"))
    with deterministic():
        plain_loop(model, optimizer, task.loss, task.batches(steps), precision=precision, **kwargs)
    return model


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", ["resnet", "transformer"])
def test_the_weights_are_those_of_the_plain_loop(kind, precision):
    task = Task(kind)
    trainer = trainer_of(task, deterministic=True, **in_precision(precision))
    fit(trainer, task, STEPS)
    assert same_weights(trainer.get_model(), loop_by_hand(task, precision))
    assert not same_weights(trainer.get_model(), task.model().to(DEVICE))  # they were trained


@pytest.mark.parametrize("precision", PRECISIONS)
def test_clipping_acts_on_gradients_that_are_not_scaled(precision):
    task = Task("transformer")
    model = task.model()
    norms: list[float] = []
    see = listener(on_optimizer_step_start=lambda trainer, **_: norms.append(float(trainer.gradient_norm)))
    trainer = trainer_of(task, [see], model, optimizer=sgd(model), deterministic=True, **in_precision(precision))
    fit(trainer, task, STEPS, gradient_clip_norm=0.1)
    assert same_weights(model, loop_by_hand(task, precision, sgd, clip=0.1))
    assert 0 < max(norms) < SCALE / 10  # before clipping


@pytest.mark.parametrize("kind", ["resnet", "transformer"])
def test_fused_and_default_optimizers_equal_the_plain_loop(kind):
    def fused(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    task = Task(kind)
    model = task.model()
    trainer = trainer_of(task, model=model, optimizer=fused(model), deterministic=True, mixed_precision="bf16")
    fit(trainer, task, STEPS)
    assert same_weights(model, loop_by_hand(task, "bf16", fused))


def test_batches_copied_on_a_side_stream_are_those_computed():
    """A loader that copies each batch during the previous step, so that reading too early gives other numbers."""
    task = Task("resnet")
    batches = [tuple(map(pinned, batch)) for batch in task.batches(STEPS)]
    model = task.model()
    trainer = trainer_of(task, model=model, deterministic=True)
    copied = on_side_stream(batches, DEVICE) if ON_GPU else map(on_device, batches)
    trainer.create_train_dataloader = lambda *_: OwnShard(copied)
    trainer.train([0] * task.batch_size, 1, per_device_batch_size=task.batch_size)
    assert trainer.progress.update == STEPS
    assert same_weights(model, loop_by_hand(task, "no"))


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.pin_memory() if ON_GPU else tensor


class Overflows(Trainer):
    """The loss of the third step is infinite."""

    def calculate_train_batch_loss(self, batch: Any) -> Any:
        output = super().calculate_train_batch_loss(batch)
        if self.progress.step == 2:
            output["loss"] = output["loss"] * float("inf")
        return output


@pytest.mark.extension("advice")
def test_an_update_with_overflowing_gradients_is_skipped(capsys):
    task, steps = Task("transformer"), 6
    model, rates, skipped, kept = task.model(), [], [], []

    def see(trainer: Trainer, **kwargs: Any) -> None:
        skipped.append(trainer.update_was_skipped)
        rates.append(trainer.optimizer.param_groups[0]["lr"])
        kept.append(clone(trainer.get_model()))

    listening = [callbacks.AdviceCallback, listener(on_optimizer_step_end=see)]
    trainer = Overflows(model, task.loss, sgd(model), listening, deterministic=True, **in_precision("fp16"))
    fit(trainer, task, steps, create_scheduler_fn=lambda optimizer: StepLR(optimizer, 1, gamma=0.5))
    assert skipped == [False, False, True, False, False, False]
    assert same_weights(kept[2].to(DEVICE), kept[1].to(DEVICE))
    assert not same_weights(kept[3].to(DEVICE), kept[2].to(DEVICE))
    assert rates == [0.01 * 0.5**update for update in (1, 2, 2, 3, 4, 5)]  # the schedule did not advance
    assert trainer.progress.update == steps  # it is counted
    assert f"1 of {steps} updates were skipped" in " ".join(capsys.readouterr().out.split())
    assert trainer.accelerator.scaler.get_scale() < SCALE
    by_hand = loop_by_hand(task, "fp16", sgd, steps, make_overflow=2, rate_falls=0.5)
    assert same_weights(model, by_hand)
