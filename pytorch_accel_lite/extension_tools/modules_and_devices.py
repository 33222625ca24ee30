"""Modules and their tensors: modes, wrappers, shards, quantised weights; devices, their memory and waiting for them."""

from pytorch_accel_lite.base.devices import (
    AsyncCopy,
    accumulation_dtype,
    capacity_of,
    is_asynchronous,
    is_out_of_memory,
    module_of,
    record_event,
    to_float,
)
from pytorch_accel_lite.base.mixed_precision import mixed_precision
from pytorch_accel_lite.base.module_modes import evaluation_mode, keep_in_eval, preserving_modes, release_from_eval
from pytorch_accel_lite.base.quantised_weights import (
    is_frozen_and_quantised,
    is_quantised_by,
    plain_parts,
    quantised_entries,
)
from pytorch_accel_lite.base.sharded_weights import are_sharded, local_shard, reshard
from pytorch_accel_lite.base.types import ChosenModules
from pytorch_accel_lite.base.unwrapping import class_of, unsharded_class, unwrap

__all__ = [
    "AsyncCopy", "ChosenModules", "accumulation_dtype", "are_sharded", "capacity_of", "class_of", "evaluation_mode",
    "is_asynchronous", "is_frozen_and_quantised", "is_out_of_memory", "is_quantised_by", "keep_in_eval",
    "local_shard", "mixed_precision", "module_of", "plain_parts", "preserving_modes", "quantised_entries",
    "record_event", "release_from_eval", "reshard", "to_float", "unsharded_class", "unwrap",
]  # fmt: skip
