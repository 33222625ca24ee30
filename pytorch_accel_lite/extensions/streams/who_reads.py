"""Choosing which process reads what of data that are read in turn."""

from __future__ import annotations

import torch
from torch.utils.data import IterableDataset

from pytorch_accel_lite.extension_tools.data_and_batches import (
    LoaderOptions,
    ShardedLoader,
    Source,
    copy_loader,
    is_loader_of_torch,
    of_all_processes,
)
from pytorch_accel_lite.extension_tools.processes import Ranks
from pytorch_accel_lite.extensions.streams.read_by_each import PreShardedLoader
from pytorch_accel_lite.extensions.streams.read_by_first import StreamLoader
from pytorch_accel_lite.extensions.streams.read_in_parts import DividedLoader
from pytorch_accel_lite.extensions.streams.stream_shards import find_self_sharding, part_of_this_process


def read_in_turn(source: Source, ranks: Ranks, device: torch.device, options: LoaderOptions) -> ShardedLoader:
    """Return the loader for a source that is not read by index. Call it on every process."""
    if not is_loader_of_torch(source):
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
