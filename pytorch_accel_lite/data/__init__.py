"""Samplers and loaders: order, position, sharding and batched reading."""

from pytorch_accel_lite.base.batches import Batch
from pytorch_accel_lite.data.iterable_datasets import MixtureStream, ShuffledStream
from pytorch_accel_lite.data.iterables import OwnShard
from pytorch_accel_lite.data.loader import FailedRead, LoaderOptions, ShardedLoader
from pytorch_accel_lite.data.loader_choice import Data, IndexedData, NamedData, shard
from pytorch_accel_lite.data.mixtures import Mixture, MixtureSampler, NamedDatasets, NamedSampler
from pytorch_accel_lite.data.token_batches import TokenBatchSampler

__all__ = [
    "Batch",
    "Data",
    "FailedRead",
    "IndexedData",
    "LoaderOptions",
    "Mixture",
    "MixtureSampler",
    "MixtureStream",
    "NamedData",
    "NamedDatasets",
    "NamedSampler",
    "OwnShard",
    "ShardedLoader",
    "ShuffledStream",
    "TokenBatchSampler",
    "shard",
]
