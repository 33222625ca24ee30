"""Sharded weights (FSDP2): a run that is resumed in its middle, uneven shares, and what is refused.

On machines without GPUs Accelerate ignores its FSDP plugin, so it is told that it has several of them.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.tensor import DTensor


def large_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1)).double()


def sharding_accelerator(version: int = 2, of_accelerator: Any = None, **kwargs: Any) -> Accelerator:
    PartialState(cpu=True)._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, **kwargs)
    return Accelerator(fsdp_plugin=plugin, **(of_accelerator or {}))


def gathered(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}
