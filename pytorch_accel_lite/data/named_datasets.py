"""Datasets by name, read together: a sample has one of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Literal

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from pytorch_accel_lite.base.arguments import check_choice
from pytorch_accel_lite.data.sources import Index, IndexedData, Sample, Source, find_length, is_named


class NamedDatasets(Dataset[Sample]):
    """Several map datasets, by name. A sample is a dict with one sample of each, a batch a dict with one batch of each.

    Args:
        datasets: the datasets by name; when shuffled, they are paired at random in every epoch
        length: length of an epoch: ``"min"`` for that of the shortest dataset, ``"max"`` for that of the longest, with
            the shorter ones repeated

    Attributes:
        sizes: the number of samples in each dataset, by name

    Raises:
        ValueError: if there are no datasets, or one is empty or has no length
    """

    def __init__(self, datasets: Mapping[str, IndexedData], length: Literal["min", "max"] = "min") -> None:
        check_choice("length", length, ("min", "max"))
        self.sizes = sizes_of(datasets, "Combine iterable ones into one IterableDataset that yields dicts.")
        self.datasets = dict(datasets)
        self._length = min(self.sizes.values()) if length == "min" else max(self.sizes.values())

    def create_sampler(self, shuffle: bool) -> NamedSampler:
        """Return the sampler with which a trainer reads these datasets."""
        return NamedSampler(self, shuffle)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, indices: Index) -> dict[str, Sample]:
        """Return a sample of each dataset, given one index for all or a sequence with an index for each, in order."""
        if isinstance(indices, int) or getattr(indices, "ndim", 1) == 0:  # including those of numpy and torch
            indices = [indices % size for size in self.sizes.values()]
        return {name: data[index] for (name, data), index in zip(self.datasets.items(), indices, strict=True)}


class NamedSampler(Sampler[tuple[int, ...]]):
    """Samples each dataset in a separate order, repeated as necessary for the length of an epoch.

    Args:
        datasets: the datasets whose samples are paired
        shuffle: whether to draw a random order for every pass; otherwise the order is sequential
    """

    def __init__(self, datasets: NamedDatasets, shuffle: bool) -> None:
        self.datasets = datasets
        self.shuffle = shuffle

    def __len__(self) -> int:
        return len(self.datasets)

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        orders = [self._endless(size) for size in self.datasets.sizes.values()]
        return islice(zip(*orders, strict=False), len(self))

    def _endless(self, size: int) -> Iterator[int]:
        while True:
            yield from torch.randperm(size).tolist() if self.shuffle else range(size)


def as_one_dataset(data: Source) -> Source:
    """Combine several datasets by name into one; return anything else unchanged."""
    return NamedDatasets(data) if is_named(data) else data


def describe_lengths(sampler: NamedSampler) -> str:
    """Return in a line how datasets of different lengths are read in an epoch; empty if all lengths are equal."""
    if len(set(sampler.datasets.sizes.values())) == 1:
        return ""
    sizes, length = sampler.datasets.sizes, len(sampler)
    deciding = next(name for name, size in sizes.items() if size == length)
    if length == max(sizes.values()):
        how = f"longest, {deciding!r}; the others are repeated"
    else:
        used = "drawn again in each epoch" if sampler.shuffle else "the first ones"
        how = f"shortest, {deciding!r}; of the others, as many samples are used, {used}"
    shown = ", ".join(f"{name!r} {size:,}" for name, size in sizes.items())
    return f"The datasets differ in length ({shown}): an epoch is as long as the {how}."


def sizes_of(datasets: Mapping[str, IndexedData], advice: str) -> dict[str, int]:
    """Check map datasets by name, and return their lengths.

    Args:
        advice: what to do with other datasets
    """
    check_are_named(datasets)
    sizes: dict[str, int] = {}
    for name, dataset in datasets.items():
        is_loader = isinstance(dataset, DataLoader)
        size = None if is_loader or isinstance(dataset, IterableDataset) else find_length(dataset)
        if size is None:
            advice = "Pass its dataset." if is_loader else advice
            raise ValueError(
                f"The dataset {name!r} ({type(dataset).__name__}) cannot be indexed or has no length. {advice}"
            )
        if not size:
            raise ValueError(f"The dataset {name!r} is empty.")
        sizes[name] = size
    return sizes


def check_are_named(datasets: Mapping[str, IndexedData]) -> None:
    """Check that there are datasets, by name."""
    if not isinstance(datasets, Mapping):
        raise TypeError(f"Datasets must be in a dict by name, not {type(datasets).__name__}.")
    if not datasets:
        raise ValueError("A dict of datasets must have at least one.")
