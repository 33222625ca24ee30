"""What the processes keep the same themselves: parameters and buffers beside the prepared model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pytorch_accel_lite.checkpoint.beside_model import buffers_beside_model
from pytorch_accel_lite.distributed.prepared import are_sharded, local
from pytorch_accel_lite.gradients import parameters_not_in_model

if TYPE_CHECKING:
    from pytorch_accel_lite.run import Run
    from pytorch_accel_lite.trainer import Trainer


def keep_in_step(trainer: Trainer, run: Run) -> None:
    """Start with the same values on all processes, and note whose gradients and buffers each update must equalise."""
    run.synced_buffers = buffers_beside_model(trainer)
    if not trainer.is_sharded:
        run.averaged_here = parameters_not_in_model(trainer.model, trainer.optimizer)
        trainer.ranks.copy_from_first(run.averaged_here)
    elif are_sharded(trainer.model.parameters()):
        _keep_beside_shards(trainer, run)


def _keep_beside_shards(trainer: Trainer, run: Run) -> None:
    """Do so for plain parameters beside sharded ones, such as adapters, and for buffers.

    In tensor parallelism without ``fully_shard``, also for the shards, which several processes train on different data.
    """
    from pytorch_accel_lite.sharding.accumulation import accumulating_shards
    from pytorch_accel_lite.sharding.layout import covers

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
