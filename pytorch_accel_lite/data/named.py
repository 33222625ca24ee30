"""Reading several datasets at once, as in multi-task and semi-supervised training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Literal

import torch
from torch.utils.data import Sampler

from pytorch_accel_lite.base.inspection import find_length
from pytorch_accel_lite.base.validation import check_choice
from pytorch_accel_lite.data.order import WithOwnSampler


class NamedDatasets(WithOwnSampler):
    """Several map datasets, by name. A sample is a dict with one sample of each, a batch a dict with one batch of each.

    :param datasets: the datasets by name; when shuffled, they are paired at random in every epoch
    :param length: length of an epoch: with ``"min"`` that of the shortest dataset, with ``"max"`` that of the longest,
        while the shorter ones are repeated
    :raises ValueError: if there are no datasets, or one is empty or has no length
    """

    def __init__(self, datasets: Mapping[str, Any], length: Literal["min", "max"] = "min") -> None:
        check_choice("length", length, ("min", "max"))
        if not datasets:
            raise ValueError("A dict of datasets must not be empty.")
        self.datasets = dict(datasets)
        self.sizes: dict[str, int] = {}
        for name, dataset in datasets.items():
            size = find_length(dataset)
            if size is None:
                raise ValueError(
                    f"The dataset {name!r} ({type(dataset).__name__}) has no length, but the datasets of a dict must "
                    "be map datasets. Combine iterable ones into one IterableDataset that yields dicts."
                )
            if not size:
                raise ValueError(f"The dataset {name!r} is empty.")
            self.sizes[name] = size
        self._length = min(self.sizes.values()) if length == "min" else max(self.sizes.values())

    def create_sampler(self, shuffle: bool) -> NamedSampler:
        """Return the sampler that a trainer reads these datasets with."""
        return NamedSampler(self, shuffle)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, indices: Any) -> dict[str, Any]:
        """Return a sample of each dataset, given one index for all or a sequence with an index for each, in order."""
        if isinstance(indices, int) or getattr(indices, "ndim", 1) == 0:  # including those of numpy and torch
            indices = [indices % size for size in self.sizes.values()]
        return {name: data[index] for (name, data), index in zip(self.datasets.items(), indices, strict=True)}


class NamedSampler(Sampler[tuple[int, ...]]):
    """Samples each dataset in a separate order, repeated as necessary for the length of an epoch.

    :param shuffle: whether to draw a random order for every pass; otherwise the order is sequential
    """

    def __init__(self, datasets: NamedDatasets, shuffle: bool) -> None:
        self._datasets = datasets
        self._shuffle = shuffle

    def __len__(self) -> int:
        return len(self._datasets)

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        orders = [self._endless(size) for size in self._datasets.sizes.values()]
        return islice(zip(*orders, strict=False), len(self))

    def _endless(self, size: int) -> Iterator[int]:
        while True:
            yield from torch.randperm(size).tolist() if self._shuffle else range(size)
