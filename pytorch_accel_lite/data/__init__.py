"""Samplers and loaders: order, position, sharding, batched fetch."""

from pytorch_accel_lite.data.loader import FailedRead, LoadedBatch, OwnShard, ShardedLoader, shard
from pytorch_accel_lite.data.named import NamedDatasets, NamedSampler

__all__ = ["FailedRead", "LoadedBatch", "NamedDatasets", "NamedSampler", "OwnShard", "ShardedLoader", "shard"]
