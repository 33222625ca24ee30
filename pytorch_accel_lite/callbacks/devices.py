"""Placing modules on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytorch_accel_lite import attributes
from pytorch_accel_lite.events import TrainerCallback

if TYPE_CHECKING:
    from pytorch_accel_lite.trainer import Trainer


class MoveModulesToDeviceCallback(TrainerCallback):
    """Move every module among the trainer's attributes, including lists and dicts of modules, to its device.

    The model is excluded: Accelerate places it.
    """

    def _move(self, trainer: Trainer) -> None:
        for module in attributes.modules(trainer).values():
            module.to(trainer.device)

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        self._move(trainer)

    def on_evaluation_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        self._move(trainer)

    def on_predict_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        self._move(trainer)
