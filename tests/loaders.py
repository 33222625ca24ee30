"""Datasets whose samples are their indices, and the samples that the loader of a rank reads."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import TensorDataset

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
