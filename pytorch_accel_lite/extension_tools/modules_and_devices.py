"""Modules and their tensors: modes, wrappers, shards, quantised weights; devices, their memory and waiting for them."""

from __future__ import annotations

import torch
from accelerate.utils.memory import should_reduce_batch_size
from torch import nn

from pytorch_accel_lite.base.machine import (
    AsyncCopy,
    accumulation_dtype,
    is_asynchronous,
    module_of,
    record_event,
    to_float,
)
from pytorch_accel_lite.base.modules import (
    are_sharded,
    evaluation_mode,
    keep_in_eval,
    local_shard,
    mixed_precision,
    preserving_modes,
    release_from_eval,
    reshard,
    unwrap,
)
from pytorch_accel_lite.base.quantised_weights import (
    is_frozen_and_quantised,
    is_quantised_by,
    plain_parts,
    quantised_entries,
)
from pytorch_accel_lite.base.types import ChosenModules

__all__ = [
    "AsyncCopy", "ChosenModules", "accumulation_dtype", "are_sharded", "capacity_of", "class_of", "evaluation_mode",
    "is_asynchronous", "is_frozen_and_quantised", "is_out_of_memory", "is_quantised_by", "keep_in_eval",
    "local_shard", "mixed_precision", "module_of", "plain_parts", "preserving_modes", "quantised_entries",
    "record_event", "release_from_eval", "reshard", "to_float", "unsharded_class", "unwrap",
]  # fmt: skip


def capacity_of(device: torch.device) -> int | None:
    """Return the size of a device's memory in bytes; ``None`` if torch does not know it, as for a CPU."""
    properties = getattr(module_of(device), "get_device_properties", None)
    return None if properties is None else getattr(properties(device), "total_memory", None)


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error means that the device or the host ran out of memory."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or should_reduce_batch_size(error)


def class_of(model: nn.Module) -> type[nn.Module]:
    """Return the class of a model in the user's program, even if ``fully_shard`` has derived another from it."""
    return unsharded_class(type(model))


def unsharded_class(kind: type) -> type:
    """Return the class from which ``fully_shard`` has derived a class; any other class unchanged."""
    is_derived = len(kind.__mro__) > 2 and kind.__mro__[1].__name__ == "FSDPModule"
    return kind.__mro__[2] if is_derived else kind
