"""Base classes of schedulers that map the number of updates to values of the parameter groups."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch

from pytorch_accel_lite.base.nested_values import to_number
from pytorch_accel_lite.base.types import StateDict
from pytorch_accel_lite.optimizers.scheduled_options import set_option


class SchedulerBase(ABC):
    """Base class of schedulers that set a field of the parameter groups as a function of the number of updates.

    Override ``get_updated_values()``. The initial values of the groups are in ``base_lr_values``, and also in the
    groups as ``initial_lr``, so that a second scheduler starts from the same values.

    Args:
        optimizer: optimizer whose parameter groups are scheduled
        param_group_field: name of the field to set

    Attributes:
        base_lr_values: the initial value of the field in each parameter group
    """

    def __init__(self, optimizer: torch.optim.Optimizer, param_group_field: str = "lr") -> None:
        if not hasattr(optimizer, "param_groups"):
            raise TypeError(f"optimizer={optimizer!r} must be an instance of torch.optim.Optimizer.")
        self.optimizer = optimizer
        self.param_group_field = param_group_field
        for group in optimizer.param_groups:
            if param_group_field not in group:
                raise ValueError(
                    f"param_group_field={param_group_field!r} is not in the optimizer's parameter groups, which have "
                    f"{sorted(group.keys() - {'params'})}."
                )
            group.setdefault(f"initial_{param_group_field}", to_number(group[param_group_field]))
        self.base_lr_values = [to_number(group[f"initial_{param_group_field}"]) for group in optimizer.param_groups]

    @abstractmethod
    def get_updated_values(self, num_updates: int) -> Iterable[float] | float | None:
        """Return the value for the next update, after ``num_updates`` updates.

        Args:
            num_updates: number of updates made so far

        Returns:
            one value for all parameter groups, a value for each group, or ``None`` to leave the groups unchanged
        """

    def step_update(self, num_updates: int) -> None:
        """Set the parameter groups to the values after a number of updates.

        Args:
            num_updates: number of updates made so far
        """
        values = self.get_updated_values(num_updates)
        if values is None:
            return
        groups = self.optimizer.param_groups
        values = list(values) if isinstance(values, Iterable) else [values] * len(groups)
        if len(values) != len(groups):
            raise ValueError(
                f"{type(self).__name__}.get_updated_values returned {len(values)} values for {len(groups)} parameter "
                "groups. Return one for each, or a single number."
            )
        for group, value in zip(groups, values, strict=True):
            set_option(group, self.param_group_field, value)

    def get_last_lr(self) -> list[float]:
        """Return the current value of each parameter group."""
        return [to_number(group[self.param_group_field]) for group in self.optimizer.param_groups]

    def state_dict(self) -> StateDict:
        """Return all attributes except the optimizer. Override it if some attributes are not plain values."""
        return {name: value for name, value in vars(self).items() if name != "optimizer"}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load the state returned by ``state_dict()``."""
        vars(self).update(state_dict)


class StatefulSchedulerBase(SchedulerBase):
    """Base class of schedulers that count the updates: call ``step()`` after each update, as the trainer does.

    The first update uses the optimizer's values. If your schedule starts differently, call ``self.step_update(0)`` at
    the end of the constructor.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, param_group_field: str = "lr") -> None:
        super().__init__(optimizer, param_group_field)
        self._num_updates = 0

    @property
    def num_updates(self) -> int:
        """The number of updates counted so far."""
        return self._num_updates

    def step(self) -> None:
        """Count an update, and set the parameter groups to the values for the next update."""
        self._num_updates += 1
        self.step_update(self._num_updates)
