"""Choosing the loader for a source of batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from pytorch_accel_lite.data.loader import LoaderKwargs, LoaderOptions, ShardedLoader
from pytorch_accel_lite.data.map_loader import MapLoader
from pytorch_accel_lite.data.sources import IndexedData, OwnShard, Sample, Source
from pytorch_accel_lite.distributed import Ranks
from pytorch_accel_lite.extension_names import Slot

#: What a trainer reads: a dataset, a ``DataLoader`` or ``OwnShard``, or anything with an element for each sample.
Data = Dataset[Sample] | DataLoader[Sample] | OwnShard | IndexedData
#: Data, or several data by name.
NamedData = Data | Mapping[str, Data]
#: Checks of a dataset that can be indexed, before each of several processes reads its share: called on all of them. An
#: extension adds its own.
SHARED_DATA_CHECKS: list[Callable[[Source, Ranks], None]] = []
#: Options of a ``DataLoader`` that a run config reports.
_REPORTED = ("batch_size", "drop_last", "num_workers", "persistent_workers", "pin_memory")
#: Returns the loader for a source that is read in turn.
SequentialReader: TypeAlias = Callable[[Source, Ranks, torch.device, LoaderOptions], ShardedLoader]
#: What reads data in turn: streams, and batches that are ready.
SEQUENTIAL_READER: Slot[SequentialReader] = Slot("streams")


def is_loader(data: object) -> bool:
    """Whether the user has passed a loader, which yields batches, in place of a dataset."""
    return isinstance(data, (DataLoader, OwnShard))


def dataset_of(data: Source) -> Source:
    """Return the dataset that a ``DataLoader`` reads; anything else unchanged."""
    batches = data.batches if isinstance(data, OwnShard) else data
    return batches.dataset if isinstance(batches, DataLoader) else batches


def options_of(loader: Source) -> LoaderKwargs:
    """Return the options with which a loader reads its dataset, if it has any."""
    batches = loader.batches if isinstance(loader, OwnShard) else loader
    return {name: getattr(batches, name) for name in _REPORTED if hasattr(batches, name)}


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
