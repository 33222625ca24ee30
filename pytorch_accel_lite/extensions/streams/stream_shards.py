"""Sharded streams: finding how a stream shards itself by process, and dividing streams that do not."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import NamedTuple

import torch.utils.data
from torch.utils.data import IterableDataset

from pytorch_accel_lite.extension_tools.arguments_and_errors import warn_outside
from pytorch_accel_lite.extension_tools.data_and_batches import PASS_OWN_SHARD, Source, nested_in
from pytorch_accel_lite.extension_tools.processes import Ranks

#: Classes of other packages that determine their rank themselves, by package and name.
_RANK_AWARE = {("litdata", "StreamingDataset"), ("streaming", "StreamingDataset")}
_DATA_PIPE = getattr(torch.utils.data, "IterDataPipe", ())


def streams_in(stream: Source) -> list[Source]:
    """Return a stream and the streams that are its attributes, at any depth."""
    return nested_in(stream, _is_stream) if _is_stream(stream) else []


def _is_stream(value: object) -> bool:
    return isinstance(value, IterableDataset)


class SelfSharding(NamedTuple):
    """The part of the data that a stream yields.

    Args:
        shared_by: name of the mechanism that shards the data
        rank: index of the part, out of ``world_size``; ``None`` if it is the rank of the process
        world_size: the number of parts; ``None`` if it is the number of processes
    """

    shared_by: str
    rank: int | None = None
    world_size: int | None = None


def _self_sharding(stream: Source) -> SelfSharding | None:
    """Return how a stream shards itself; ``None`` if it seems to yield all data."""
    kind = type(stream).__name__
    split = getattr(stream, "_distributed", None)  # Hugging Face datasets
    if split is not None and hasattr(split, "rank") and hasattr(split, "world_size"):
        return SelfSharding(f"split_dataset_by_node ({kind})", split.rank, split.world_size)
    if kind == "IterableDatasetShard":  # from Accelerate and transformers
        return SelfSharding(kind, stream.process_index, stream.num_processes)
    stages = getattr(stream, "pipeline", None)  # webdataset
    names = [getattr(getattr(stage, "func", stage), "__name__", "") for stage in stages or () if callable(stage)]
    if any("split_by_node" in name for name in names):
        return SelfSharding(f"split_by_node ({kind})")
    if any((package_of(base), base.__name__) in _RANK_AWARE for base in type(stream).__mro__):
        return SelfSharding(f"{package_of(type(stream))}.{kind}")
    if isinstance(stream, _DATA_PIPE) and hasattr(stream, "apply_sharding"):
        return SelfSharding(kind)  # torch's DataLoader passes it the rank
    return None


def package_of(thing: Callable[..., object]) -> str:
    """Return the name of the package that defines a class or a function."""
    return str(thing.__module__).partition(".")[0]


def find_self_sharding(stream: Source, ranks: Ranks) -> str:
    """Return the mechanism by which a stream shards itself over the processes; empty if the trainer must shard it.

    Call it on every process.

    Raises:
        ValueError: with several processes, if the parts of the processes overlap or are incomplete
    """
    share = next(filter(None, map(_self_sharding, streams_in(stream))), None)
    if share is not None and share.rank is None and ranks.replicas > 1:
        raise ValueError(
            f"The data are sharded by {share.shared_by} over all processes, but {ranks.replicas} processes share each "
            "batch, as they compute it together. Split them by trainer.data_ranks.rank and "
            "trainer.data_ranks.world_size, or do not split them and let the trainer shard them."
        )
    if ranks.world_size == 1:
        if share is not None and (share.world_size or 1) > 1:
            warn_outside(
                f"The data are part {share.rank} of {share.world_size}, as sharded by {share.shared_by}, but there is "
                "only one process: the other parts are not read."
            )
        return ""
    if isinstance(stream, _DATA_PIPE) and share is None:
        raise ValueError(
            f"{type(stream).__name__} has no sharding_filter(), and torch's DataLoader reads a data pipe on every "
            f"process: each sample would be read {ranks.world_size} times. Add .sharding_filter() to the pipe."
        )
    shares = ranks.all_gather_object(share)
    sharded = [share for share in shares if share is not None]
    by_rank = [share for share in sharded if share.rank is None]
    parts = {(share.rank, share.world_size) for share in sharded}
    if sharded and len(by_rank) < len(shares) and parts != {(rank, len(shares)) for rank in range(len(shares))}:
        read = ["all" if share is None else f"part {share.rank} of {share.world_size}" for share in shares]
        raise ValueError(
            f"The data are sharded by {sharded[0].shared_by}, but not over the processes of this job, which would "
            f"read: {', '.join(read)}. Split them by trainer.ranks.rank and trainer.ranks.world_size, or do not split "
            f"them and let the trainer shard them. {PASS_OWN_SHARD}"
        )
    return "" if share is None else share.shared_by


def can_be_divided(stream: Source) -> bool:
    """Whether a stream is from Hugging Face, or has a method ``shard(rank, world_size)``."""
    return _is_hugging_face(stream) or _has_shard_method(stream)


def part_of(stream: Source, rank: int, world_size: int) -> Source:
    """Return one of several parts of a stream that together have each sample once; ``None`` if it cannot be divided.

    Hugging Face's streams are divided by their shards, if the shards can be divided evenly.
    """
    if _has_shard_method(stream):
        return stream.shard(rank, world_size)
    if not _is_hugging_face(stream) or stream.num_shards % world_size:
        return None
    from datasets.distributed import split_dataset_by_node  # type: ignore[import-untyped]

    return split_dataset_by_node(stream, rank, world_size)


def part_of_this_process(stream: Source, ranks: Ranks) -> Source:
    """Return this process's part of a stream; ``None`` if the stream is not divided. Call it on every process."""
    if ranks.world_size == 1 or not can_be_divided(stream):
        return None
    parts: list[Source] = []

    def divide() -> list[object]:
        parts.append(part_of(stream, ranks.rank, ranks.world_size))
        return [parts[0] is None, *map(_order_of_shards, streams_in(stream))]

    gathered = ranks.run_together(divide)
    return parts[0] if all(other == gathered[0] for other in gathered) else None


def division_method(stream: Source) -> str:
    """Return the name of the mechanism by which a stream is divided."""
    kind = type(stream).__name__
    return f"{kind}.shard()" if _has_shard_method(stream) else f"split_dataset_by_node ({kind})"


def _order_of_shards(stream: Source) -> object:
    """Return what determines the order of a Hugging Face stream's shards, such as a seed drawn on each process."""
    shuffling = getattr(stream, "_shuffling", None)
    return getattr(stream, "num_shards", None), shuffling and str(shuffling.generator.bit_generator.state)


def _has_shard_method(stream: Source) -> bool:
    method = getattr(type(stream), "shard", None)
    return callable(method) and [*signature(method).parameters][1:3] == ["rank", "world_size"]


def _is_hugging_face(stream: Source) -> bool:
    return package_of(type(stream)) == "datasets" and hasattr(stream, "num_shards")
