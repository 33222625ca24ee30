"""Optimizers, their rates and parameters, and the gradients of an update."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from pytorch_accel_lite.base.nested_values import to_number
from pytorch_accel_lite.distributed.gradient_sync import average_gradients, no_sync_within_window, sync_ddp_buffers
from pytorch_accel_lite.loop.guards.arguments_and_datasets import not_optimized
from pytorch_accel_lite.optimizers.optimizer_parts import (
    CreateScheduler,
    TrainerOptimizer,
    group_names,
    is_created,
    optimized_parameters,
    parts_of_optimizer,
    schedulers_in,
    unwrapped_parts,
)
from pytorch_accel_lite.optimizers.optimizer_steps import needs_closure
from pytorch_accel_lite.optimizers.scheduled_options import (
    Options,
    ParamGroup,
    Rate,
    initial_options,
    layer_scales,
    scheduled_options,
    set_option,
)
from pytorch_accel_lite.run.accumulation import Count, WindowCounts, as_weight
from pytorch_accel_lite.run.run import TrainerLike
from pytorch_accel_lite.run.trained_objects import (
    all_optimized_parameters,
    all_registered_objects,
    buffers_in,
    evaluating_optimizers,
    other_modules,
    other_optimizers,
    parameters_not_in_model,
    set_optimizer_modes,
)
from pytorch_accel_lite.steps.clipping import clip_keeping_norm, total_norm

__all__ = [
    "Count", "CreateScheduler", "Options", "ParamGroup", "Rate", "TrainerOptimizer", "WindowCounts",
    "all_optimized_parameters", "all_registered_objects", "as_weight", "average_gradients", "buffers_in",
    "clip_keeping_norm", "current_rates", "evaluating_optimizers", "format_rates", "group_names", "initial_options",
    "is_created", "layer_scales", "learning_rates", "needs_closure", "no_sync_within_window", "not_optimized",
    "optimized_parameters", "other_modules", "other_optimizers", "parameters_not_in_model", "parts_of_optimizer",
    "scheduled_options", "schedulers_in", "set_optimizer_modes", "set_option", "sync_ddp_buffers", "total_norm",
    "unwrapped_parts",
]  # fmt: skip


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


def format_rates(rates: Sequence[Rate | torch.Tensor]) -> str:
    """Return learning rates as a text, each once."""
    return ", ".join(dict.fromkeys("none" if rate is None else f"{rate:.3g}" for rate in rates))


def learning_rates(optimizer: Optimizer, name: str = "lr") -> list[Rate]:
    """Return the learning rate of each parameter group, ``None`` for groups without one.

    Args:
        name: ``"lr"``, or ``"initial_lr"`` for the rates before any schedule, if they are known
    """
    return [to_number(group.get(name, group.get("lr"))) for group in optimizer.param_groups]
