"""Accumulating the gradients of a sharded model with no more communication than an update needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pytorch_accel_lite.base.batches import BatchOutput
from pytorch_accel_lite.base.modules import are_sharded, local
from pytorch_accel_lite.base.protocols import TrainerLike
from pytorch_accel_lite.checkpoint.beside_model import buffers_beside_model
from pytorch_accel_lite.data import Batch
from pytorch_accel_lite.distributed.layout import covers, infos_of, is_hybrid
from pytorch_accel_lite.engine.training import forward_and_backward
from pytorch_accel_lite.optimizers.gradients import parameters_not_in_model

if TYPE_CHECKING:
    from pytorch_accel_lite.engine.run import Run

if TYPE_CHECKING:
    from pytorch_accel_lite.engine.run import Run

    Step = Callable[[TrainerLike, Run, Batch], BatchOutput | None]


def accumulating_shards(model: nn.Module, steps: int) -> Step | None:
    """Return a step that reduces the gradients of modules sharded by ``fully_shard`` only at the end of a window.

    Gradients of a single dimension are reduced once, and kept whole until then. Those of two dimensions (HSDP) are
    divided over the first group in every step, which takes less memory, and reduced over the groups once.

    :param steps: number of batches in a window
    :return: ``None`` if the usual step will do
    """
    from torch.distributed.fsdp import FSDPModule

    parts: list[Any] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not parts:
        return None
    reduces = True

    def set_reduction(ends_window: bool) -> None:
        nonlocal reduces
        if ends_window != reduces:
            reduces = ends_window
            for part in parts:
                if any(map(is_hybrid, infos_of(part))):
                    part.set_requires_all_reduce(ends_window, recurse=False)
                else:
                    part.set_requires_gradient_sync(ends_window, recurse=False)

    for part in parts:  # a run that failed within a window leaves them otherwise
        part.set_requires_gradient_sync(True, recurse=False)
    if steps == 1:
        return None

    def step(trainer: TrainerLike, run: Run, batch: Batch) -> BatchOutput:
        set_reduction(trainer.accelerator.sync_gradients)
        return forward_and_backward(trainer, run, batch)

    return step


def keep_replicas_equal(trainer: TrainerLike, run: Run) -> None:
    """Start with the same values on all processes, and note whose gradients and buffers each update must equalise."""
    run.synced_buffers = buffers_beside_model(trainer)
    if not trainer.is_sharded:
        run.averaged_here = parameters_not_in_model(trainer.model, trainer.optimizer)
        trainer.ranks.copy_from_first(run.averaged_here)
    elif are_sharded(trainer.model.parameters()):
        _keep_beside_shards(trainer, run)


def _keep_beside_shards(trainer: TrainerLike, run: Run) -> None:
    """Do so for plain parameters beside sharded ones, such as adapters, and for buffers.

    In tensor parallelism without ``fully_shard``, also for the shards, which several processes train on different data.
    """
    model = trainer.model
    parameters = [*model.parameters(), *parameters_not_in_model(model, trainer.optimizer)]
    run.averaged_here = [parameter for parameter in parameters if not covers(parameter, run.data_ranks)]
    buffers = {name: buffer for name, buffer in model.named_buffers() if _is_plain(buffer)}
    trainer.ranks.copy_from_first([*filter(_is_plain, run.averaged_here), *buffers.values()])
    run.data_ranks.copy_from_first([local(shard) for shard in run.averaged_here if not _is_plain(shard)])
    changing = set(model.state_dict())  # constants are usually not in it
    run.special_step = accumulating_shards(model, run.window.steps)
    kept = [name.rpartition(".") for name in buffers if name in changing]
    run.synced_buffers += [(model.get_submodule(owner), name) for owner, _, name in kept]


def _is_plain(tensor: torch.Tensor) -> bool:
    return not hasattr(tensor, "device_mesh")
