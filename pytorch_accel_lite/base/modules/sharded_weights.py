"""Weights that are sharded over the processes: recognising them, and this process's shards."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn


def are_sharded(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether any of the parameters is sharded over the processes, as a ``DTensor``."""
    # Looking up an attribute that a plain parameter lacks takes ten times as long as checking its type.
    others = [parameter for parameter in parameters if type(parameter) is not nn.Parameter]
    return any(hasattr(parameter, "device_mesh") for parameter in others)


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's shard of a sharded tensor; any other tensor unchanged."""
    part: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def reshard(model: nn.Module) -> None:
    """Reshard the parameters: without a backward pass, FSDP2 keeps the parameters gathered last.

    ``model.parameters()`` would then return the gathered parameters, which the optimizer does not know.
    """
    for module in model.modules():
        method = getattr(module, "reshard", None)
        if callable(method):
            method()


def tensor_parallel_size(accelerator: Accelerator) -> int:
    """Return the number of processes that share each batch according to the accelerator's ``parallelism_config``."""
    return getattr(getattr(accelerator, "parallelism_config", None), "tp_size", 1) or 1


#: Kinds of jobs in which Accelerate only adds bookkeeping to an optimizer, so the user's optimizer is stepped directly.
PLAIN_JOBS = {kind for kind in DistributedType if kind.name == "NO" or kind.name.startswith("MULTI_")}
#: Kinds of jobs in which Accelerate shards the weights, or what trains them.
SHARDED_JOBS = {kind for kind in DistributedType if kind.name in ("FSDP", "DEEPSPEED", "MEGATRON_LM")}


def is_sharded(accelerator: Accelerator, model: nn.Module) -> bool:
    """Whether the weights of a model are or will be sharded over the processes, by Accelerate or by the user."""
    return accelerator.distributed_type in SHARDED_JOBS or are_sharded(model.parameters())
