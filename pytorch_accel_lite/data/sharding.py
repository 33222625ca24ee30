"""Choosing the loader for a source of batches."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from pytorch_accel_lite.data.iterables import PreShardedLoader, StreamLoader
from pytorch_accel_lite.data.loader import LoaderOptions, ShardedLoader
from pytorch_accel_lite.data.map import MapLoader
from pytorch_accel_lite.data.self_sharding import check_same_rows, find_own_share
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
    if not isinstance(source, DataLoader) or type(source).__iter__ is not DataLoader.__iter__:
        return PreShardedLoader(source, ranks, device, chosen)
    if isinstance(source.dataset, IterableDataset) or source.batch_sampler is None:
        share = find_own_share(source.dataset, ranks)
        if share is None:
            return StreamLoader(source, ranks, device, chosen)
        return PreShardedLoader(source, ranks, device, chosen, share.shared_by)
    check_same_rows(source.dataset, ranks)
    return MapLoader(source, ranks, device, chosen)
