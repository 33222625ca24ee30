"""Choosing the loader for a source of batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from pytorch_accel_lite.data.iterables import OwnShard, PreShardedLoader
from pytorch_accel_lite.data.loader import LoaderKwargs, LoaderOptions, ShardedLoader, copy_loader
from pytorch_accel_lite.data.map_loader import MapLoader
from pytorch_accel_lite.data.order import of_all_processes
from pytorch_accel_lite.data.sources import IndexedData, Sample, Source
from pytorch_accel_lite.data.stream_shards import find_self_sharding, package_of, part_of_this_process
from pytorch_accel_lite.data.streams import DividedLoader, StreamLoader
from pytorch_accel_lite.distributed import Ranks

#: What a trainer reads: a dataset, a ``DataLoader`` or ``OwnShard``, or anything with an element for each sample.
Data = Dataset[Sample] | DataLoader[Sample] | OwnShard | IndexedData
#: Data, or several data by name.
NamedData = Data | Mapping[str, Data]
#: Checks of a dataset that can be indexed, before each of several processes reads its share: called on all of them. An
#: extension adds its own.
SHARED_DATA_CHECKS: list[Callable[[Source, Ranks], None]] = []
#: Options of a ``DataLoader`` that a run config reports.
_REPORTED = ("batch_size", "drop_last", "num_workers", "persistent_workers", "pin_memory")


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
    # torchdata's StatefulDataLoader has the same options as torch's DataLoader.
    packages = ("torch", "torchdata")
    is_own = type(source) is not DataLoader and isinstance(source, DataLoader)
    is_of_torch = package_of(type(source).__iter__) in packages if is_own else isinstance(source, DataLoader)
    if not is_of_torch or isinstance(source.dataset, IterableDataset) or source.batch_sampler is None:
        if options.shares is not None:
            dataset = getattr(source, "dataset", source)
            raise ValueError(
                f"{options.shares.argument}={options.shares.total} needs data that can be indexed, in a DataLoader, "
                f"to give each {options.shares.owner} its own share; {type(dataset).__name__} is read in turn. Use a "
                "dataset with __len__ and __getitem__."
            )
        return _read_in_turn(source, ranks, device, options, is_of_torch)
    if ranks.world_size > 1:
        for check in SHARED_DATA_CHECKS:
            check(source.dataset, ranks)
    return MapLoader(source, ranks, device, options)


def _read_in_turn(
    source: Source, ranks: Ranks, device: torch.device, options: LoaderOptions, is_of_torch: bool
) -> ShardedLoader:
    """Return the loader for a source that cannot be indexed.

    Args:
        is_of_torch: whether the source is a ``DataLoader`` of torch
    """
    if not is_of_torch:
        return PreShardedLoader(source, ranks, device, options)
    if ranks.world_size > 1 and not isinstance(source.dataset, IterableDataset):
        source = copy_loader(source, sampler=of_all_processes(source.sampler, ranks.world_size))
    shared_by = find_self_sharding(source.dataset, ranks)
    if shared_by:
        return PreShardedLoader(source, ranks, device, options, shared_by)
    part = part_of_this_process(source.dataset, ranks) if options.divides else None
    if part is not None:
        return DividedLoader(source, part, ranks, device, options)
    return StreamLoader(source, ranks, device, options)
