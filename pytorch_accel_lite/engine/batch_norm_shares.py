"""Batch sizes for batch norm, which cannot train on a single sample."""

from __future__ import annotations

import math

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from pytorch_accel_lite.base.environment import warn_outside
from pytorch_accel_lite.base.protocols import TrainerLike
from pytorch_accel_lite.engine.run import Run
from pytorch_accel_lite.optimizers.freezing import stays_in_eval


def smallest_share(trainer: TrainerLike, run: Run) -> int:
    """Return the least number of samples a process may get in a step if it gets any: two if the model has batch norm.

    Call it on every process at the start of an epoch, with the model in training mode. Warns if the epoch ends with a
    batch of a single sample.
    """
    if not any(isinstance(module, _BatchNorm) for module in trainer.model.modules()):
        return 1
    ranks = trainer.ranks
    norm = _find_norm(trainer.model, ranks.world_size)
    if norm and ranks.rank == 0 and run.data.train_loader.ends_in_one_sample(_steps_of_epoch(run)):
        warn_outside(
            f"The last batch of an epoch has a single sample, and the model has batch norm in training mode ({norm}): "
            "torch raises an error where that leaves it a single value for each channel, and elsewhere the statistics "
            "of one sample are poor. Leave that batch out with train_dataloader_kwargs={'drop_last': True}, or choose "
            "another per_device_batch_size."
        )
    return 2 if ranks.max([norm is not None])[0] else 1


def _steps_of_epoch(run: Run) -> float:
    """Return the number of steps of the epoch that the limit on updates allows, including those already taken."""
    limit = run.request.max_num_train_steps
    progress = run.progress
    return math.inf if limit is None else progress.step + (limit - progress.update) * run.window.steps


def _find_norm(model: nn.Module, world_size: int) -> str | None:
    """Return the description of a batch norm that normalises with the statistics of this process's batch, if any."""
    for name, module in model.named_modules():
        if not isinstance(module, _BatchNorm) or (isinstance(module, nn.SyncBatchNorm) and world_size > 1):
            continue
        if module.running_mean is None or (module.training and not stays_in_eval(module)):
            return f"{type(module).__name__} {name.removeprefix('module.')!r}"
    return None
