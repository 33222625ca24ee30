"""Samplers and loaders: order, position, sharding and batched reading."""

from pytorch_accel_lite.base.batch import Batch
from pytorch_accel_lite.data.iterables import OwnShard
from pytorch_accel_lite.data.loader import FailedRead, LoadedBatch, LoaderOptions, ShardedLoader
from pytorch_accel_lite.data.mixture_streams import MixtureStream
from pytorch_accel_lite.data.mixtures import Mixture, MixtureBatchSampler, MixtureSampler
from pytorch_accel_lite.data.named import NamedDatasets, NamedSampler
from pytorch_accel_lite.data.sharding import shard
from pytorch_accel_lite.data.shuffled_stream import ShuffledStream
from pytorch_accel_lite.data.streams import ReadByAll

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
