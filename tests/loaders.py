"""Datasets whose samples are their indices, and what the loaders of several ranks read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

from pytorch_accel_lite.data import shard
from pytorch_accel_lite.distributed import Ranks


class AlikeRanks(Ranks):
    """All of them have the same data and, under a seed, draw the same orders."""

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value] * self.world_size


def rank_of(rank: int, world_size: int) -> Ranks:
    """One of several ranks that, under a seed, know their shares by themselves."""
    ranks = AlikeRanks(Accelerator())
    ranks.rank, ranks.world_size = rank, world_size
    return ranks


def numbers(size: int) -> TensorDataset:
    return TensorDataset(torch.arange(size))


def samples(step: list[Any]) -> list[int]:
    return [sample for loaded in step for sample in loaded.data[0][: loaded.num_samples].tolist()]


def read(
    size: int,
    batch: int,
    world_size: int,
    start: int = 0,
    epoch: int = 1,
    training: bool = True,
    min_share: int = 1,
    **kwargs: Any,
) -> list[list[Any]]:
    """The batches of all ranks, by step."""

    def make_source(rank: int) -> Any:
        return DataLoader(numbers(size), batch, shuffle=training, **kwargs)

    return read_from(make_source, world_size, start, epoch, training, min_share)


def read_from(
    make_source: Callable[[int], Any],
    world_size: int,
    start: int = 0,
    epoch: int = 1,
    training: bool = True,
    min_share: int = 1,
) -> list[list[Any]]:
    by_rank = []
    for rank in range(world_size):
        loader = shard(make_source(rank), rank_of(rank, world_size), torch.device("cpu"), seed=3, training=training)
        by_rank.append(list(loader.steps(epoch, start, min_share=min_share)))
    assert not training or len({len(steps) for steps in by_rank}) == 1
    longest = max(map(len, by_rank))
    return [[steps[i] for steps in by_rank if i < len(steps)] for i in range(longest)]
