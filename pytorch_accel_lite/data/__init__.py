"""Samplers and loaders: order, position, sharding and batched reading."""

from pytorch_accel_lite.data.iterables import OwnShard
from pytorch_accel_lite.data.loader import Batch, FailedRead, LoadedBatch, LoaderOptions, ShardedLoader
from pytorch_accel_lite.data.named import NamedDatasets, NamedSampler
from pytorch_accel_lite.data.sharding import shard

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
