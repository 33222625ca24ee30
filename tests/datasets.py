"""Datasets and samplers that draw random numbers, read many samples at once, or have no end."""

from __future__ import annotations

import random
from collections.abc import Iterable

import numpy as np
import torch
from torch.utils.data import IterableDataset, Sampler

from tests.small_models import Rows, float64_data


class Noisy(Rows):
    """A draw from each generator; reading a sample twice gives different noise unless it is seeded."""

    def __getitem__(self, index):
        x, _ = super().__getitem__(index)
        return x, torch.rand(1), np.random.rand(), random.random()


class Batched(Rows):
    """Reads many samples at once."""

    calls = 0

    def __getitem__(self, index):
        raise AssertionError("one at a time")

    def __getitems__(self, indices):
        self.calls += 1
        return [self.data[index] for index in indices]


class Order(Sampler):
    """Any order, drawn one by one."""

    def __init__(self, order: Iterable[int]) -> None:
        self.order = order

    def __iter__(self):
        return iter(self.order)

    def __len__(self):
        return 3


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield from float64_data(10)
