"""Choosing the loader for a source of batches."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from pytorch_accel_lite.data.consistency import check_same_data
from pytorch_accel_lite.data.loader import LoaderOptions, ShardedLoader
from pytorch_accel_lite.data.map import MapLoader
from pytorch_accel_lite.data.streams import create_loader
from pytorch_accel_lite.distributed import Ranks


def shard(
    source: Any, ranks: Ranks, device: torch.device, seed: int | None, training: bool, **options: Any
) -> ShardedLoader:
    """Return a loader that gives this process its share of any source of batches.

    :param source: a ``DataLoader``, or any other iterable of batches (see :class:`OwnShard`)
    :param training: whether every process must take the same number of steps; in evaluation, a process may take fewer
    :param options: further :class:`LoaderOptions`
    """
    if isinstance(source, ShardedLoader):
        return source
    if not hasattr(source, "__iter__") and not hasattr(source, "__getitem__"):
        raise TypeError(f"A dataloader must be an iterable of batches, not {type(source).__name__}.")
    chosen = LoaderOptions(seed, training, **options)
    is_loader = isinstance(source, DataLoader) and _is_of_torch(type(source).__iter__)
    if is_loader and chosen.split_batches:
        source = _with_split_batches(source, chosen.shares.total if chosen.shares else ranks.world_size)
    if not is_loader or isinstance(source.dataset, IterableDataset) or source.batch_sampler is None:
        if chosen.shares is not None:
            dataset = getattr(source, "dataset", source)
            raise ValueError(
                f"logical_processes={chosen.shares.total} needs data that can be indexed, in a DataLoader, to give "
                f"each logical process its own share; {type(dataset).__name__} is read in turn. Use a dataset with "
                "__len__ and __getitem__."
            )
        return create_loader(source, ranks, device, chosen, is_loader)
    if ranks.world_size > 1:
        if chosen.dispatch_batches:
            raise ValueError(
                "dispatch_batches=True in the accelerator's DataLoaderConfiguration: each process reads its share of "
                f"data that can be indexed itself, here of a {type(source.dataset).__name__}. Leave it out or, if "
                "only the first process can read the data, pass an IterableDataset, which it reads for all."
            )
        check_same_data(source.dataset, ranks)
    return MapLoader(source, ranks, device, chosen)


def _with_split_batches(source: DataLoader[Any], processes: int) -> DataLoader[Any]:
    """Return a loader like another one, with the batch size of one of the processes that share a batch.

    The batches of a user's ``batch_sampler`` are divided when they are read.
    """
    if source.batch_sampler is None:
        raise ValueError(
            "split_batches=True in the accelerator's DataLoaderConfiguration, but the DataLoader has batch_size=None: "
            "batches that the dataset makes cannot be split. Pass a batch_size, or leave split_batches out and let the "
            "dataset make smaller batches."
        )
    if source.batch_size is None:
        return source
    size, rest = divmod(source.batch_size, processes)
    if rest:
        raise ValueError(
            f"split_batches=True in the accelerator's DataLoaderConfiguration: batches of {source.batch_size} samples "
            f"cannot be divided evenly among {processes} processes. Choose a multiple of {processes}, or leave "
            "split_batches out and pass the batch size of one process."
        )
    batches: Any = type(source.batch_sampler)(source.sampler, size, source.drop_last)  # type: ignore[call-arg]
    split = copy.copy(source)
    vars(split).update(batch_size=size, batch_sampler=batches)  # torch refuses to set them
    return split


def _is_of_torch(method: Any) -> bool:
    """Whether a method is torch's own, or that of torchdata's ``StatefulDataLoader``, which has the same options."""
    return method.__module__.partition(".")[0] in ("torch", "torchdata")
