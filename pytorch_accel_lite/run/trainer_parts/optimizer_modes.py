"""Optimizers with a mode for training and one for evaluation, such as schedule-free ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pytorch_accel_lite.optimizers.optimizer_steps import set_mode
from pytorch_accel_lite.run.run import TrainerLike
from pytorch_accel_lite.run.trainer_parts.objects_in_attributes import other_optimizers


def set_optimizer_modes(trainer: TrainerLike, training: bool) -> None:
    """Set the mode of all optimizers that have modes."""
    if trainer.prepared_model is not None:
        trainer.prepared_model.trains = training
    for optimizer in (trainer.optimizer, *other_optimizers(trainer).values()):
        set_mode(optimizer, training)


@contextmanager
def evaluating_optimizers(trainer: TrainerLike) -> Iterator[None]:
    """Set optimizers that have modes to evaluation mode for a block."""
    if trainer.prepared_model is None or not trainer.prepared_model.trains:
        yield
        return
    set_optimizer_modes(trainer, training=False)
    try:
        yield
    finally:
        set_optimizer_modes(trainer, training=True)
