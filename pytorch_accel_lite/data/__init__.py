"""Samplers and loaders: order, position, sharding, batched fetch."""

from pytorch_accel_lite.data.loader import LoadedBatch, OwnShard, ShardedLoader, shard

__all__ = ["LoadedBatch", "OwnShard", "ShardedLoader", "shard"]
