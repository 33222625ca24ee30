"""The batches of a process: their order, shares, reading and placing on the device."""

from pytorch_accel_lite.base.missing_extensions import add_missing_name_errors
from pytorch_accel_lite.data.batches import Batch
from pytorch_accel_lite.data.loader_base import FailedRead, LoaderOptions, ShardedLoader
from pytorch_accel_lite.data.loader_creation import LoaderKwargs, shard
from pytorch_accel_lite.data.named_datasets import NamedDatasets, NamedSampler
from pytorch_accel_lite.data.sources import (
    BatchData,
    CollateFunction,
    Data,
    IndexedData,
    NamedData,
    OwnShard,
    Sample,
    Source,
)
from pytorch_accel_lite.extensions.mixtures import Mixture, MixtureSampler, MixtureStream
from pytorch_accel_lite.extensions.packing import (
    PackSequences,
    TokenBatchSampler,
    packed_attention,
    packed_mask,
    packed_mask_function,
    unpack,
)
from pytorch_accel_lite.extensions.shuffled_streams import ShuffledStream

__all__ = [
    "Batch",
    "BatchData",
    "CollateFunction",
    "Data",
    "FailedRead",
    "IndexedData",
    "LoaderKwargs",
    "LoaderOptions",
    "Mixture",
    "MixtureSampler",
    "MixtureStream",
    "NamedData",
    "NamedDatasets",
    "NamedSampler",
    "OwnShard",
    "PackSequences",
    "Sample",
    "ShardedLoader",
    "ShuffledStream",
    "Source",
    "TokenBatchSampler",
    "packed_attention",
    "packed_mask",
    "packed_mask_function",
    "shard",
    "unpack",
]

add_missing_name_errors(__name__)
