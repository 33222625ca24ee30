"""Choosing the loader that divides the batches of a source: by index, or read in turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch.utils.data import DataLoader, IterableDataset

from pytorch_accel_lite.base.slots import Slot
from pytorch_accel_lite.data.loader_base import LoaderOptions, ShardedLoader
from pytorch_accel_lite.data.map_loader import MapLoader
from pytorch_accel_lite.data.sources import Source
from pytorch_accel_lite.distributed import Ranks

#: Checks of a dataset that can be indexed, before each of several processes reads its share: called on all of them. An
#: extension adds its own.
SHARED_DATA_CHECKS: list[Callable[[Source, Ranks], None]] = []
#: Returns the loader for a source that is read in turn.
SequentialReader: TypeAlias = Callable[[Source, Ranks, torch.device, LoaderOptions], ShardedLoader]
#: What reads data in turn: streams, and batches that are ready.
SEQUENTIAL_READER: Slot[SequentialReader] = Slot("streams")


def shard(
    source: Source, ranks: Ranks, device: torch.device, seed: int | None, training: bool, **options: Any
) -> ShardedLoader:
    """Return a loader that yields this process's share of any source of batches.

    Args:
        source: a ``DataLoader``, or any other iterable of batches (see ``OwnShard``)
        training: whether every process must take the same number of steps; in evaluation, a process may take fewer
        options: further ``LoaderOptions``
    """
    return create_loader(source, ranks, device, LoaderOptions(seed, training, **options))


def create_loader(source: Source, ranks: Ranks, device: torch.device, options: LoaderOptions) -> ShardedLoader:
    """Return the loader for a source of batches; a source that is already such a loader is returned unchanged."""
    if isinstance(source, ShardedLoader):
        return source
    if not hasattr(source, "__iter__") and not hasattr(source, "__getitem__"):
        raise TypeError(
            f"A dataloader must be an iterable of batches, not {type(source).__name__}: see what your "
            "create_train_dataloader or create_eval_dataloader returns."
        )
    if not _is_indexed(source):
        kind = type(getattr(source, "dataset", source)).__name__
        if options.shares is not None:
            raise ValueError(
                f"{options.shares.argument}={options.shares.total} needs data that can be indexed, in a DataLoader, "
                f"to give each {options.shares.owner} its own share; {kind} is read in turn. Use a "
                "dataset with __len__ and __getitem__."
            )
        read = SEQUENTIAL_READER.get(f"Reading {kind} in turn, rather than by index,")
        return read(source, ranks, device, options)
    if ranks.world_size > 1:
        for check in SHARED_DATA_CHECKS:
            check(source.dataset, ranks)
    return MapLoader(source, ranks, device, options)


def _is_indexed(source: Source) -> bool:
    """Whether a source is a ``DataLoader`` that reads samples by their indices, in batches."""
    has_batches = is_loader_of_torch(source) and source.batch_sampler is not None
    return has_batches and not isinstance(source.dataset, IterableDataset)


def is_loader_of_torch(source: Source) -> bool:
    """Whether a source is a ``DataLoader`` that reads as torch's does: its class has no ``__iter__`` of a user."""
    if not isinstance(source, DataLoader):
        return False
    # torchdata's StatefulDataLoader has the same options.
    package = str(type(source).__iter__.__module__).partition(".")[0]
    return type(source) is DataLoader or package in ("torch", "torchdata")
