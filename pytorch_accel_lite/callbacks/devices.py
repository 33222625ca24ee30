"""Placing modules on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytorch_accel_lite import attributes
from pytorch_accel_lite.events import TrainerCallback

if TYPE_CHECKING:
    from pytorch_accel_lite.trainer import Trainer


class MoveModulesToDeviceCallback(TrainerCallback):
    """Moves every module that is an attribute of the trainer, or in a list or dict that is, to its device.

    The model is left out: Accelerate places it.
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
