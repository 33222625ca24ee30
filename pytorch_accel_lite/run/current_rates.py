"""The learning rates that bars and tables show."""

from __future__ import annotations

import torch

from pytorch_accel_lite.optimizers.optimizer_parts import parts_of_optimizer
from pytorch_accel_lite.run.run import TrainerLike
from pytorch_accel_lite.run.scheduler_stepping import is_stepped_after_updates


def current_rates(trainer: TrainerLike) -> dict[str, float | torch.Tensor]:
    """Return the rate of the first parameter group: ``lr``, or ``lr_<name>`` for each of several optimizers.

    Rates that are tensors are copied, not read from the device.
    """
    parts = parts_of_optimizer(trainer.optimizer)
    named = [(f"lr_{name}", part) for name, part in parts.items()] if parts else [("lr", trainer.optimizer)]
    rates = {}
    for name, part in named:  # in each update: as few calls as possible
        rate = part.param_groups[0].get("lr") if part.param_groups else None
        if rate is not None:
            rates[name] = rate.clone() if isinstance(rate, torch.Tensor) else rate
    return rates


def rates_change_in_each_update(trainer: TrainerLike) -> bool:
    """Return whether a schedule sets the next rate in each update, so that the rate in use must be noted before it."""
    return is_stepped_after_updates(trainer)
