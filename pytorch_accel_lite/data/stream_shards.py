"""Streams that can be divided, so that each process reads a part of its own."""

from __future__ import annotations

import copy
from inspect import signature
from typing import Any

from torch.utils.data import DataLoader

from pytorch_accel_lite.data.samplers import of_all_processes
from pytorch_accel_lite.data.self_sharding import streams_in
from pytorch_accel_lite.distributed import Ranks

#: Name under which a position holds those in all parts of a stream.
PARTS = "parts_of_a_divided_stream"


def can_be_divided(stream: Any) -> bool:
    """Whether a stream is one of Hugging Face, or has a method ``shard(rank, world_size)``."""
    return _is_hugging_faces(stream) or _has_method(stream)


def part_of(stream: Any, rank: int, world_size: int) -> Any:
    """Return a part of a stream, which together with the others gives each sample once; ``None`` if there is none.

    Hugging Face's streams are divided by their shards, and only if all parts have equally many.
    """
    if _has_method(stream):
        return stream.shard(rank, world_size)
    if not _is_hugging_faces(stream) or stream.num_shards % world_size:
        return None
    from datasets.distributed import split_dataset_by_node  # type: ignore[import-untyped]

    return split_dataset_by_node(stream, rank, world_size)


def own_part_of(stream: Any, ranks: Ranks) -> Any:
    """Return the part of a stream that this process reads; ``None`` if it is not divided. Call it on every process."""
    if ranks.world_size == 1 or not can_be_divided(stream):
        return None
    parts: list[Any] = []

    def divide() -> list[Any]:
        parts.append(part_of(stream, ranks.rank, ranks.world_size))
        return [parts[0] is None, *map(_order_of_shards, streams_in(stream, []))]

    found = ranks.run_together(divide)
    return parts[0] if all(other == found[0] for other in found) else None


def how_divided(stream: Any) -> str:
    """Return the name of the mechanism by which a stream is divided."""
    kind = type(stream).__name__
    return f"{kind}.shard()" if _has_method(stream) else f"split_dataset_by_node ({kind})"


def over(loader: DataLoader[Any], dataset: Any) -> DataLoader[Any]:
    """Return a loader like another one, but over a part of its dataset."""
    return _with(loader, "dataset", dataset)


def in_whole_order(loader: DataLoader[Any], world_size: int) -> DataLoader[Any]:
    """Return a loader like one without a batch sampler, whose sampler gives the order of all processes.

    :raises ValueError: if the sampler gives a part of it that cannot be undone
    """
    return _with(loader, "sampler", of_all_processes(loader.sampler, world_size))


def _with(loader: DataLoader[Any], name: str, value: Any) -> DataLoader[Any]:
    """Return a copy of a loader with another attribute that torch refuses to set: others depend on it, but not here."""
    other = copy.copy(loader)
    vars(other)[name] = value
    return other


def is_divided(position: Any) -> bool:
    """Whether a position holds those in all parts of a stream."""
    return isinstance(position, dict) and PARTS in position


def _order_of_shards(stream: Any) -> Any:
    """Return what the order of a Hugging Face stream's shards follows from: a seed drawn on each process, perhaps."""
    shuffling = getattr(stream, "_shuffling", None)
    return getattr(stream, "num_shards", None), shuffling and str(shuffling.generator.bit_generator.state)


def _has_method(stream: Any) -> bool:
    method = getattr(type(stream), "shard", None)
    return callable(method) and [*signature(method).parameters][1:3] == ["rank", "world_size"]


def _is_hugging_faces(stream: Any) -> bool:
    return type(stream).__module__.partition(".")[0] == "datasets" and hasattr(stream, "num_shards")
