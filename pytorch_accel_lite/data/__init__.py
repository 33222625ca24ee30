"""Samplers and loaders: order, position, sharding and batched reading."""

from pytorch_accel_lite.base.batches import Batch
from pytorch_accel_lite.data.iterables import OwnShard
from pytorch_accel_lite.data.loader import FailedRead, LoadedBatch, LoaderOptions, ShardedLoader
from pytorch_accel_lite.data.mixture_streams import MixtureStream
from pytorch_accel_lite.data.mixtures import Mixture, MixtureBatchSampler, MixtureSampler, NamedDatasets, NamedSampler
from pytorch_accel_lite.data.sharding import shard
from pytorch_accel_lite.data.streams import ReadByAll, ShuffledStream

__all__ = [
    "Batch",
    "FailedRead",
    "LoadedBatch",
    "LoaderOptions",
    "Mixture",
    "MixtureBatchSampler",
    "MixtureSampler",
    "MixtureStream",
    "NamedDatasets",
    "NamedSampler",
    "OwnShard",
    "ReadByAll",
    "ShardedLoader",
    "ShuffledStream",
    "shard",
]
