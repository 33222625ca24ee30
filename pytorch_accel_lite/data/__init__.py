"""Samplers and loaders: order, position, sharding and batched reading."""

from typing import TYPE_CHECKING

from pytorch_accel_lite.data.loader import Batch, FailedRead, LoadedBatch, LoaderOptions, ShardedLoader
from pytorch_accel_lite.data.sharding import shard
from pytorch_accel_lite.lazy import loaded_when_named

if TYPE_CHECKING:
    from pytorch_accel_lite.data.iterables import OwnShard
    from pytorch_accel_lite.data.named import NamedDatasets, NamedSampler

__all__ = [
    "Batch",
    "FailedRead",
    "LoadedBatch",
    "LoaderOptions",
    "NamedDatasets",
    "NamedSampler",
    "OwnShard",
    "ShardedLoader",
    "shard",
]

_NAMED = "pytorch_accel_lite.data.named"
__getattr__ = loaded_when_named(
    __name__, {"NamedDatasets": _NAMED, "NamedSampler": _NAMED, "OwnShard": "pytorch_accel_lite.data.iterables"}
)
