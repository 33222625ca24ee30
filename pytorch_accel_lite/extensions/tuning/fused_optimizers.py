"""Optimizers that have a faster fused variant."""

from __future__ import annotations

import torch

from pytorch_accel_lite.extension_tools.modules_and_devices import are_sharded
from pytorch_accel_lite.extension_tools.optimizers_and_gradients import (
    TrainerOptimizer,
    optimized_parameters,
    parts_of_optimizer,
)

_VARIANTS = ("fused", "foreach", "capturable", "differentiable")
_FUSING_DEVICES = ("cpu", "cuda", "mps", "xpu")


def unfused_class(optimizer: TrainerOptimizer) -> str:
    """Return the class of an optimizer that has a faster fused variant for its parameters; ``""`` for any other.

    For SGD, the fused variant is not clearly faster. A variant that was chosen explicitly is respected.
    """
    single: TrainerOptimizer = getattr(optimizer, "optimizer", optimizer)
    for part in parts_of_optimizer(optimizer).values() or [single]:
        parameters = list(optimized_parameters(part))
        is_chosen = any(group.get(name) for group in part.param_groups for name in _VARIANTS)
        is_possible = all(p.is_floating_point() and p.device.type in _FUSING_DEVICES for p in parameters)
        is_possible = is_possible and type(part) in (torch.optim.Adam, torch.optim.AdamW)
        if is_possible and not is_chosen and not are_sharded(parameters):
            return type(part).__name__
    return ""
