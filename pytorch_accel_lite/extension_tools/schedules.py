"""Learning rate schedules, also by name, and the lengths of a run. Below the data."""

from __future__ import annotations

from typing import ClassVar

import torch

from pytorch_accel_lite.base.types import StateDict
from pytorch_accel_lite.optimizers.optimizer_parts import CreateScheduler
from pytorch_accel_lite.optimizers.scheduled_options import layer_scales
from pytorch_accel_lite.schedulers.placeholders import TrainerPlaceholderValues, Unresolved
from pytorch_accel_lite.schedulers.schedule_arguments import NAMED_SCHEDULES, ScheduleName, resolve_names
from pytorch_accel_lite.schedulers.scheduler_base import SchedulerBase, StatefulSchedulerBase

__all__ = [
    "CreateScheduler", "NAMED_SCHEDULES", "PlannedLrScheduler", "RUN_EPOCHS", "ScheduleName", "SchedulerBase",
    "TrainerPlaceholderValues", "UPDATES_PER_EPOCH", "Unresolved", "resolve_names",
]  # fmt: skip

UPDATES_PER_EPOCH: Unresolved = TrainerPlaceholderValues.NUM_UPDATE_STEPS_PER_EPOCH
# Epochs of the run, a fraction if it is limited by max_num_train_steps.
RUN_EPOCHS: Unresolved = TrainerPlaceholderValues.MAX_NUM_TRAIN_STEPS / UPDATES_PER_EPOCH


class PlannedLrScheduler(StatefulSchedulerBase):
    """A learning rate schedule that its arguments determine. Its state has only its position and the initial rates.

    The arguments are not part of the state, so a run resumed with more epochs follows the longer schedule.

    If a parameter group has the key ``lr_scale``, as from timm's layer decay, its rate is multiplied by that value.

    Attributes:
        applies_lr_scale: whether the scheduler does so; those that do not are warned of
    """

    applies_lr_scale: ClassVar[bool] = True

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self._layer_scales = layer_scales(optimizer.param_groups, self.base_lr_values)

    def _rates_before_scaling(self, num_updates: int) -> list[float]:
        """Return the rate of each group after a number of updates, without its ``lr_scale``."""
        raise NotImplementedError

    def get_updated_values(self, num_updates: int) -> list[float]:
        """Return the learning rate of each group after a number of updates."""
        rates = self._rates_before_scaling(num_updates)
        return [rate * scale for rate, scale in zip(rates, self._layer_scales, strict=True)]

    def state_dict(self) -> StateDict:
        """Return the number of updates and the initial learning rate of each group."""
        return {"num_updates": self._num_updates, "base_lr_values": list(self.base_lr_values)}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load the state returned by ``state_dict()``, and set the learning rates accordingly.

        Raises:
            ValueError: if the state lacks the number of updates, or has another number of parameter groups
        """
        if "num_updates" not in state_dict:
            raise ValueError(
                f"The state for {type(self).__name__} lacks num_updates, the position of the schedule. It has only "
                f"{sorted(state_dict)}."
            )
        self._go_to(state_dict["num_updates"], state_dict.get("base_lr_values", self.base_lr_values))

    def _go_to(self, num_updates: int, base_lr_values: list[float]) -> None:
        if len(base_lr_values) != len(self.base_lr_values):
            raise ValueError(
                f"The state for {type(self).__name__} has {len(base_lr_values)} parameter groups, but the optimizer "
                f"has {len(self.base_lr_values)}."
            )
        self._num_updates = num_updates
        self.base_lr_values = list(base_lr_values)
        for group, value in zip(self.optimizer.param_groups, base_lr_values, strict=True):
            group["initial_lr"] = value
        self.step_update(num_updates)
