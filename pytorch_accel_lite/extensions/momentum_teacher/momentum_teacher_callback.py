"""Updating a momentum teacher, or target network, after each update or every n updates of the model."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pytorch_accel_lite.extending import RunRequest, TrainerLike
from pytorch_accel_lite.extension_tools.arguments_and_errors import check_positive_int, check_range, checked_calls
from pytorch_accel_lite.extension_tools.modules_and_devices import evaluation_mode
from pytorch_accel_lite.extensions.model_ema import ModelEmaCallback, ShardedEma

#: A momentum as a function of the number of updates so far, and in the whole run.
Schedule = Callable[[int, int], float]


@checked_calls("__init__")
class MomentumTeacherCallback(ModelEmaCallback):
    """Keep a momentum teacher or target network: a copy that follows the model and is called in training steps.

    It starts each run as a copy of the model. After each update, or every n updates,
    ``teacher = momentum * teacher + (1 - momentum) * model``, buffers included. Call it like the model:
    ``targets = teacher(inputs)``. It computes no gradients and is in evaluation mode.

    Training states include the teacher. It works for any model that
    ``ModelEmaCallback`` can average, including sharded models.

    Args:
        momentum: fraction of the teacher retained at each update, from 0 to 1, or a function that is called with the
            number of updates made before this one, from 0, and the number of updates of the run. 0 copies the model.
        every_n_updates: number of updates between two updates of the teacher, which leaves out a skipped one
        save_path: portable checkpoint file for the teacher, saved after every epoch; ``None`` does not save it

    Attributes:
        ema: the average that serves as the teacher

    Raises:
        ValueError: at the start of a run, if ``momentum`` is a function and the length of the run is not known
    """

    def __init__(
        self,
        momentum: float | Schedule = 0.996,
        *,
        every_n_updates: int = 1,
        save_path: str | os.PathLike[str] | None = None,
    ) -> None:
        self._schedule = momentum if callable(momentum) else None
        decay = 1.0 if callable(momentum) else check_range("momentum", momentum, most=1)  # set before each update
        super().__init__(decay, evaluate_during_training=False, save_path=save_path, prefix="teacher_")
        self.momentum = momentum
        self.every_n_updates = check_positive_int("every_n_updates", every_n_updates)
        self._num_updates = 0
        self._must_sync = False
        self._trainer: TrainerLike | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the teacher, without gradients. Until a run has started, it is the model itself.

        If the model is sharded, its own modules compute with the weights of the teacher, so call the teacher first:
        torch raises an error if it is called between the model's forward and backward pass.
        """
        model, average = self._get_model(), self.ema
        with torch.no_grad():
            if average is not None and not isinstance(average, ShardedEma):
                return average.module(*args, **kwargs)
            with evaluation_mode(model), average.in_place_of(model) if average is not None else nullcontext():
                return model(*args, **kwargs)

    def _get_model(self) -> nn.Module:
        if self._trainer is None:
            raise RuntimeError(
                "MomentumTeacherCallback has no model yet. Pass it to the callbacks of a trainer before you call it."
            )
        return self._trainer.get_model(keep_torch_compile=False)

    @property
    def module(self) -> nn.Module:
        """The module with the teacher's weights. For a sharded model, it cannot be called."""
        return self._average.module

    def on_init_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        self._trainer = trainer

    def configure_run(self, trainer: TrainerLike, request: RunRequest, **kwargs: object) -> None:
        super().configure_run(trainer, request, **kwargs)
        self._trainer = trainer

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        super().on_training_run_start(trainer, **kwargs)
        length = None if trainer.run_config is None else trainer.run_config.max_num_train_steps
        if length is None and self._schedule is not None:
            raise ValueError(
                f"momentum={self.momentum!r} is a function of the length of the run, and the training data have no "
                "length. Pass max_num_train_steps to train(), or a number as the momentum."
            )
        self._num_updates = length or 0
        # The wrapper copies the buffers of the first process before the next forward pass, which is after the update.
        model = trainer.model
        self._must_sync = isinstance(model, DistributedDataParallel) and model.broadcast_buffers

    def on_optimizer_step_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        update = trainer.progress.update
        if update % self.every_n_updates or trainer.update_was_skipped:
            return
        average = self._average
        if self._schedule is not None:
            momentum = self._schedule(update - 1, self._num_updates)
            vars(average)["decay"] = check_range(f"momentum({update - 1}, {self._num_updates})", momentum, most=1)
        average.update(trainer.get_model(keep_torch_compile=False))
        if self._must_sync:
            trainer.sync_buffers(average.module)
