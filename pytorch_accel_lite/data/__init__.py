"""Samplers and loaders: order, position, sharding and batched reading."""

from typing import TYPE_CHECKING

from pytorch_accel_lite.data.loader import Batch, FailedRead, LoadedBatch, LoaderOptions, ShardedLoader
from pytorch_accel_lite.data.sharding import shard
from pytorch_accel_lite.lazy import loaded_when_named

if TYPE_CHECKING:
    from pytorch_accel_lite.data.iterables import OwnShard
    from pytorch_accel_lite.data.mixture_streams import MixtureStream
    from pytorch_accel_lite.data.mixtures import Mixture, MixtureBatchSampler, MixtureSampler
    from pytorch_accel_lite.data.named import NamedDatasets, NamedSampler
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

_SOURCES = {
    "iterables": ("OwnShard",),
    "mixture_streams": ("MixtureStream",),
    "mixtures": ("Mixture", "MixtureBatchSampler", "MixtureSampler"),
    "named": ("NamedDatasets", "NamedSampler"),
    "shuffled_stream": ("ShuffledStream",),
    "streams": ("ReadByAll",),
}
__getattr__ = loaded_when_named(
    __name__, {name: f"{__name__}.{module}" for module, names in _SOURCES.items() for name in names}
)
