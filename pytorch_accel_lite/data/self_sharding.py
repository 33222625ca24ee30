"""Streams that are already sharded by process, as they shard themselves."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch.utils.data
from torch.utils.data import IterableDataset

from pytorch_accel_lite.distributed import Ranks

#: Classes of other packages that look up their rank themselves, by package and name.
_ASK_FOR_THEIR_RANK = {("litdata", "StreamingDataset"), ("streaming", "StreamingDataset")}
_DATA_PIPE: Any = getattr(torch.utils.data, "IterDataPipe", ())


class SelfSharding(NamedTuple):
    """The part of the data that a stream gives.

    :param shared_by: name of the mechanism that shards the data
    :param rank: index of the part, out of ``world_size``; ``None`` if it follows from the rank of the process
    """

    shared_by: str
    rank: int | None = None
    world_size: int | None = None


def find_share(stream: Any) -> SelfSharding | None:
    """Return how a stream, or one inside it, shards itself; ``None`` if it seems to give all data."""
    return next(filter(None, map(_share, streams_in(stream, []))), None)


def streams_in(stream: Any, seen: list[Any]) -> Iterator[Any]:
    """Yield a stream and the streams that it reads, as far as they are its attributes."""
    if not isinstance(stream, IterableDataset) or any(stream is other for other in seen):
        return
    seen.append(stream)
    yield stream
    for value in vars(stream).values():
        values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
        for inner in values:
            yield from streams_in(inner, seen)


def _share(stream: Any) -> SelfSharding | None:
    kind = type(stream).__name__
    split: Any = getattr(stream, "_distributed", None)  # Hugging Face datasets
    if hasattr(split, "rank") and hasattr(split, "world_size"):
        return SelfSharding(f"split_dataset_by_node ({kind})", split.rank, split.world_size)
    if kind == "IterableDatasetShard":  # of Accelerate and transformers
        return SelfSharding(kind, stream.process_index, stream.num_processes)
    stages = getattr(stream, "pipeline", None)  # webdataset
    names = [getattr(getattr(stage, "func", stage), "__name__", "") for stage in stages or () if callable(stage)]
    if any("split_by_node" in name for name in names):
        return SelfSharding(f"split_by_node ({kind})")
    if any((base.__module__.partition(".")[0], base.__name__) in _ASK_FOR_THEIR_RANK for base in type(stream).__mro__):
        return SelfSharding(f"{type(stream).__module__.partition('.')[0]}.{kind}")
    if isinstance(stream, _DATA_PIPE) and hasattr(stream, "apply_sharding"):
        return SelfSharding(kind)  # torch's DataLoader tells it the rank
    return None


def find_own_share(stream: Any, ranks: Ranks) -> SelfSharding | None:
    """Return how a stream shards itself over the processes; ``None`` if the trainer is to shard it.

    Call it on every process.

    :raises ValueError: with several processes, if their parts overlap or are incomplete
    """
    share = find_share(stream)
    if share is not None and share.rank is None and ranks.replicas > 1:
        raise ValueError(
            f"The data are sharded by {share.shared_by} over all processes, but {ranks.replicas} processes share each "
            "batch, as they compute it together. Split them by trainer.data_ranks.rank and "
            "trainer.data_ranks.world_size, or do not split them and let the trainer shard them."
        )
    if ranks.world_size == 1:
        if share is not None and (share.world_size or 1) > 1:
            warnings.warn(
                f"The data are part {share.rank} of {share.world_size}, as sharded by {share.shared_by}, but there is "
                "only one process: the other parts are not read.",
                stacklevel=2,
            )
        return None
    if isinstance(stream, _DATA_PIPE) and share is None:
        raise ValueError(
            f"{type(stream).__name__} has no sharding_filter(), and torch's DataLoader reads a data pipe on every "
            f"process: each sample would be read {ranks.world_size} times. Add .sharding_filter() to the pipe."
        )
    shares = ranks.all_gather_object(share)
    known = [share for share in shares if share is not None]
    by_rank = [share for share in known if share.rank is None]
    parts = {(share.rank, share.world_size) for share in known}
    if known and len(by_rank) < len(shares) and parts != {(rank, len(shares)) for rank in range(len(shares))}:
        read = ["all" if share is None else f"part {share.rank} of {share.world_size}" for share in shares]
        raise ValueError(
            f"The data are sharded by {known[0].shared_by}, but not over the processes of this job, which would "
            f"read: {', '.join(read)}. Split them by trainer.ranks.rank and trainer.ranks.world_size, or do not split "
            "them and let the trainer shard them. If this is intended, return OwnShard(DataLoader(...)) from "
            "create_train_dataloader or create_eval_dataloader."
        )
    return share
