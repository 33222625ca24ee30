"""Placing modules on the device."""

from __future__ import annotations

from pytorch_accel_lite.run.events import TrainerCallback
from pytorch_accel_lite.run.run import TrainerLike
from pytorch_accel_lite.run.trained_objects import other_modules


class MoveModulesToDeviceCallback(TrainerCallback):
    """Move every module among the trainer's attributes, including lists and dicts of modules, to its device.

    The model is excluded: Accelerate places it.
    """

    affects_training = False

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        for module in other_modules(trainer).values():
            module.to(trainer.device)

    on_evaluation_run_start = on_predict_run_start = on_training_run_start
