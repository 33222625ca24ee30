"""Batches that are too small for batch norm."""

from __future__ import annotations

import math

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from pytorch_accel_lite.base.modules import stays_in_eval
from pytorch_accel_lite.base.warnings_and_errors import warn_outside
from pytorch_accel_lite.run.run import Run, TrainerLike


def min_share_for_batch_norm(trainer: TrainerLike, run: Run) -> int:
    """Return the smallest number of samples, other than none, that a process may get in a step: two with batch norm.

    Call it on every process at the start of an epoch, with the model in training mode. Warns if the epoch ends with a
    batch of a single sample.
    """
    norms = {name: module for name, module in trainer.model.named_modules() if isinstance(module, _BatchNorm)}
    return _min_share(trainer, run, norms) if norms else 1


def _min_share(trainer: TrainerLike, run: Run, norms: dict[str, _BatchNorm]) -> int:
    ranks = run.ranks
    alone = [
        f"{type(norm).__name__} {name.removeprefix('module.')!r}"
        for name, norm in norms.items()
        if _uses_own_batch(norm, ranks.world_size)
    ]
    limit, progress = run.request.max_num_train_steps, run.progress
    steps = math.inf if limit is None else progress.step + (limit - progress.update) * run.window.steps
    if alone and ranks.rank == 0 and run.data.required_train_loader.ends_in_one_sample(steps):
        warn_outside(
            f"The last batch of an epoch has a single sample, and the model has batch norm in training mode "
            f"({alone[0]}): torch raises an error where that leaves it a single value for each channel, and elsewhere "
            "the statistics of one sample are poor. Leave that batch out with train_dataloader_kwargs="
            "{'drop_last': True}, or choose another per_device_batch_size."
        )
    return 2 if ranks.max([bool(alone)])[0] else 1


def _uses_own_batch(norm: nn.Module, world_size: int) -> bool:
    """Whether a batch norm normalises with the statistics of this process's batch."""
    if isinstance(norm, nn.SyncBatchNorm) and world_size > 1:
        return False
    return norm.running_mean is None or (norm.training and not stays_in_eval(norm))
