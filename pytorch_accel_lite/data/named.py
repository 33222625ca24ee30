"""Several datasets at once, as multi-task and semi-supervised training need them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Literal

import torch
from torch.utils.data import Dataset, Sampler

from pytorch_accel_lite.utils import check_choice, find_length


class NamedDatasets(Dataset[Any]):
    """Map datasets by name. A sample is a dict with a sample of each, so a batch is a dict with a batch of each.

    :param datasets: the datasets by name; they are paired at random in every epoch when shuffled
    :param length: ``"min"``: an epoch is as long as the shortest, and takes that many samples of each;
        ``"max"``: as long as the longest, and the shorter ones are gone through several times
    :raises ValueError: when there are none, or one is empty or without a length
    """

    def __init__(self, datasets: Mapping[str, Any], length: Literal["min", "max"] = "min") -> None:
        check_choice("length", length, ("min", "max"))
        if not datasets:
            raise ValueError("A dict of datasets needs at least one.")
        self.datasets = dict(datasets)
        self.sizes: dict[str, int] = {}
        for name, dataset in datasets.items():
            size = find_length(dataset)
            if size is None:
                raise ValueError(
                    f"The dataset {name!r} ({type(dataset).__name__}) has no length; datasets by name must be map "
                    "datasets. Combine iterable ones into one IterableDataset that yields dicts."
                )
            if not size:
                raise ValueError(f"The dataset {name!r} is empty.")
            self.sizes[name] = size
        self._length = min(self.sizes.values()) if length == "min" else max(self.sizes.values())

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, indices: Any) -> dict[str, Any]:
        """Return the samples at an index of each dataset, in their order, or all at the same index."""
        if isinstance(indices, int) or getattr(indices, "ndim", 1) == 0:  # those of numpy and torch too
            indices = [indices % size for size in self.sizes.values()]
        return {name: data[index] for (name, data), index in zip(self.datasets.items(), indices, strict=True)}


class NamedSampler(Sampler[tuple[int, ...]]):
    """Goes through each of the datasets in an order of its own, over and over, for an epoch's length.

    :param shuffle: ``False`` for the order of the datasets
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
