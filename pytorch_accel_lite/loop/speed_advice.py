"""Advice on faster data and updates, for ``AdviceCallback`` and ``diagnose()``."""

from __future__ import annotations

import torch

from pytorch_accel_lite.base.environment import cores_per_process
from pytorch_accel_lite.base.modules import are_sharded
from pytorch_accel_lite.optimizers.operations import TrainerOptimizer, optimized_parameters, parts_of_optimizer
from pytorch_accel_lite.run.state import TrainerLike

_VARIANTS = ("fused", "foreach", "capturable", "differentiable")
_FUSING_DEVICES = ("cpu", "cuda", "mps", "xpu")


def faster_data(trainer: TrainerLike) -> str:
    """Return advice, for the cores of this machine, on how to feed a model that waits for data."""
    workers = getattr(trainer.train_dataloader, "num_workers", 0)
    cores = cores_per_process(trainer.accelerator.num_processes)
    if workers < cores:
        more = "more workers" if workers else "workers"
        count = min(cores, max(8, 2 * workers))
        advice = f"Use {more}, num_workers={count} in train_dataloader_kwargs or in your DataLoader, or precompute"
    else:
        advice = f"{workers} workers already share {cores} core{'s' * (cores > 1)}; more would not help. Precompute"
    return (
        f"{advice} what the dataset does for each sample. Data that fits in memory can be a TensorDataset, which is "
        "read a batch at a time."
    )


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
