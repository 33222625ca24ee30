"""The parameters that the optimizers of a trainer change: all of them, those of an update, whether they are finite."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import chain

import torch
from torch import nn
from torch.optim import Optimizer

from pytorch_accel_lite.base.modules.sharded_weights import local_shard
from pytorch_accel_lite.optimizers.optimizer_parts import is_created, optimized_parameters
from pytorch_accel_lite.run.run import TrainerLike
from pytorch_accel_lite.run.trainer_parts.objects_in_attributes import other_optimizers


def all_optimized_parameters(trainer: TrainerLike) -> list[nn.Parameter]:
    """Return the parameters of the trainer's optimizer, which may not exist yet, and of optimizers in attributes."""
    if is_created(trainer.optimizer):
        optimized = optimized_parameters(trainer.optimizer)
    elif trainer.optimizer is None:
        optimized = []
    else:
        optimized = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    return [*optimized, *chain.from_iterable(map(optimized_parameters, other_optimizers(trainer).values()))]


def parameters_not_in_model(model: torch.nn.Module, optimizer: Optimizer) -> list[torch.nn.Parameter]:
    """Return the parameters of an optimizer that are not in the model, such as those of the loss function."""
    in_model = set(model.parameters())
    return [parameter for parameter in optimized_parameters(optimizer) if parameter not in in_model]


def updated_parameters(trainer: TrainerLike) -> list[torch.nn.Parameter]:
    """Return the parameters that an update changes: the optimizer's, and if it optimizes copies, also the model's."""
    optimized = optimized_parameters(trainer.optimizer)
    ids = set(map(id, optimized))
    has_model = any(id(parameter) in ids for parameter in trainer.model.parameters())
    if has_model or trainer.current_run.training_step.updates_one_by_one:  # the optimizer may be for another module
        return optimized
    return [*trainer.model.parameters(), *optimized]


def weights_are_finite(trainer: TrainerLike) -> bool:
    """Whether all trained parameters are finite and no buffer is NaN, on any process. Reads from the device.

    Call it on every process.
    """

    def largest(tensors: Iterable[torch.Tensor]) -> float:
        """Return the largest absolute value, or NaN if there is a NaN."""
        shards = [local_shard(t) for t in tensors if t.is_floating_point() and t.itemsize > 1]
        shards = [t.coalesce().values() if t.is_sparse else t for t in shards if t.numel()]  # for torch before 2.7
        if len({(t.device, t.dtype) for t in shards}) > 1:
            return torch.nn.utils.get_total_norm(shards, norm_type=math.inf).item()
        with torch.no_grad():  # with the same result, but without sorting by device and type
            return torch.stack(torch._foreach_norm(shards, math.inf)).max().item() if shards else 0.0

    model_parameters = trainer.model.parameters() if trainer.is_sharded else ()
    finite = math.isfinite(largest([*model_parameters, *all_optimized_parameters(trainer)]))
    finite = finite and not math.isnan(largest(trainer.model.buffers()))  # buffers may be infinite, as masks are
    return not trainer.ranks.max([float(not finite)])[0]
