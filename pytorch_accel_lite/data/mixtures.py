"""Mixtures: training on several datasets by name, each with a share of the samples."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Literal

import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Sampler

from pytorch_accel_lite.base.inspection import find_length
from pytorch_accel_lite.base.randomness import draw_seed, generator_with, mix
from pytorch_accel_lite.base.text import did_you_mean
from pytorch_accel_lite.base.types import StateDict
from pytorch_accel_lite.base.validation import check_choice, check_positive_int, check_range
from pytorch_accel_lite.data.loader import LoaderKwargs
from pytorch_accel_lite.data.mixture_shares import Stretch, added_up, choose_all, divide, whole_epoch
from pytorch_accel_lite.data.sources import Index, IndexedData, Sample, Source


class Mixture(ConcatDataset[Sample]):
    """Several map datasets to train on, by name, each with a share of the samples in every part of an epoch.

    Each dataset is read in passes, each in a new random order: no sample is repeated before the pass is complete, and
    an epoch continues where the previous one ended. Evaluation and prediction read every sample of all datasets once,
    in order.

    Args:
        datasets: the datasets by name
        weights: the shares of the samples that come from each dataset, relative to each other; by default their
            lengths, so that an epoch has each sample once
        num_samples: length of a training epoch; by default the number of samples in all datasets

    Attributes:
        stages: the weights by the first epoch that begins with them, see ``change_weights()``

    Raises:
        ValueError: if a dataset is empty or has no length, a name is unknown, or a number is not positive
    """

    def __init__(
        self,
        datasets: Mapping[str, IndexedData],
        weights: Mapping[str, float] | None = None,
        *,
        num_samples: int | None = None,
    ) -> None:
        self.sizes = _sizes_of(datasets, "Mix streams with MixtureStream.")
        parts: list[Source] = [*datasets.values()]
        super().__init__(parts)
        self.names = list(datasets)
        total = sum(self.sizes.values())
        self.num_samples = total if num_samples is None else check_positive_int("num_samples", num_samples)
        self.stages: dict[int, dict[str, float]] = {}
        self._counts: dict[int, list[int]] = {}  # samples in an epoch, by the first epoch of each stage
        self._changed: dict[int, list[Stretch]] = {}  # epochs in which weights change
        self._ended: dict[int, list[int]] = {}  # samples in changed epochs that are over
        self.change_weights(check_mixture_weights(self.sizes if weights is None else weights, self.names), 1)

    def __repr__(self) -> str:
        shares = ", ".join(f"{name!r}: {count}" for name, count in self.samples_per_epoch.items())
        return f"{type(self).__name__}({{{shares}}} samples in an epoch)"

    def name_of(self, index: int) -> str:
        """Return the name of the dataset that has the sample with an index, one of ``trainer.batch_indices``."""
        return self.names[bisect_right(self.cumulative_sizes, index)]

    def change_weights(self, weights: Mapping[str, float], epoch: int, begin: int = 0) -> None:
        """Change the weights from an epoch on, counted from 1. Weights set for later are discarded.

        Within an epoch, batches that were read ahead must be read again: ``trainer.train_dataloader.read_again()``.

        Args:
            weights: as in the constructor, but some may be 0
            begin: number of samples in that epoch before the change
        """
        self.weights = check_mixture_weights(weights, self.names, may_be_zero=True)
        if not 0 <= begin < self.num_samples:
            raise ValueError(f"begin={begin!r} must be the number of a sample in an epoch of {self.num_samples}.")
        counts = self._divide()
        self.samples_per_epoch = dict(zip(self.names, counts, strict=True))
        stretches = [stretch for stretch in self._stretches_of(epoch) if stretch.begin < begin]
        first = epoch + bool(begin)
        self._changed = {number: kept for number, kept in self._changed.items() if number < epoch}
        if begin:
            self._changed[epoch] = [*stretches, stretches[-1].followed_by(begin, self._shares, self.num_samples)]
        self._ended = {number: kept for number, kept in self._ended.items() if number < epoch}
        earlier = {number: stage for number, stage in self._counts.items() if number < first}
        self._counts = earlier | {first: counts}
        self.stages = {number: self.stages[number] for number in earlier} | {first: self.weights}

    def samples_before(self, epoch: int) -> dict[str, int]:
        """Return the number of samples of each dataset before an epoch."""
        for number in [number for number in self._changed if number < epoch]:
            choice = choose_all(self._changed.pop(number), self.num_samples)
            self._ended[number] = choice.bincount(minlength=len(self.names)).tolist()
        return dict(zip(self.names, added_up(self._counts, self._ended, epoch), strict=True))

    def datasets_of_epoch(self, epoch: int) -> torch.Tensor:
        """Return the number of the dataset of each sample in an epoch."""
        return choose_all(self._stretches_of(epoch), self.num_samples)

    def state_of_weights(self) -> StateDict:
        """Return the weights so far and the positions of their changes, for ``load_state_of_weights()``."""
        return {
            "stages": [[first, dict(weights)] for first, weights in self.stages.items()],
            "ended": [[epoch, counts] for epoch, counts in self._ended.items()],
            "changed": [[epoch, [list(stretch) for stretch in parts]] for epoch, parts in self._changed.items()],
        }

    def load_state_of_weights(self, state: StateDict) -> None:
        """Continue with the weights of a state.

        Raises:
            ValueError: if it belongs to other datasets
        """
        for first, weights in state["stages"]:
            self.change_weights(weights, first)
        self._ended = dict(state.get("ended", ()))
        self._changed = {
            epoch: [Stretch(*parts) for parts in stretches] for epoch, stretches in state.get("changed", ())
        }

    def loader_kwargs(self, batch_size: int, shuffle: bool = True, drop_last: bool = False) -> LoaderKwargs:
        """Return the arguments of a ``DataLoader`` that reads a training epoch.

        Args:
            batch_size: batch size per process
            shuffle: whether each pass over a dataset has a random order; otherwise it is in order
            drop_last: whether to drop smaller last batches
        """
        return {"batch_size": batch_size, "sampler": MixtureSampler(self, shuffle), "drop_last": drop_last}

    @property
    def _shares(self) -> list[float]:
        total = math.fsum(self.weights.values())
        return [weight / total for weight in self.weights.values()]

    def _divide(self) -> list[int]:
        """Divide the samples of an epoch in proportion to the weights."""
        counts = divide(self._shares, self.num_samples)
        for name, count in zip(self.names, counts, strict=True):
            if self.weights[name] and not count:
                raise ValueError(
                    f"The dataset {name!r} has so small a weight that none of the {self.num_samples} samples of an "
                    "epoch are from it. Increase its weight or num_samples, or leave it out."
                )
        return counts

    def _stretches_of(self, epoch: int) -> list[Stretch]:
        if epoch in self._changed:
            return self._changed[epoch]
        stage = max((first for first in self._counts if first <= epoch), default=None)
        return [] if stage is None else [whole_epoch(self._counts[stage])]


class MixtureSampler(Sampler[int]):
    """Yields the indices of a training epoch, with each dataset of a mixture spread evenly.

    Args:
        shuffle: whether each pass over a dataset has a random order
    """

    def __init__(self, mixture: Mixture, shuffle: bool) -> None:
        self.mixture = mixture
        self.shuffle = shuffle
        self._epoch = 1
        self._seed: int | None = None

    def __len__(self) -> int:
        return self.mixture.num_samples

    def __iter__(self) -> Iterator[int]:
        """Return the order of the current epoch; without a seed of the run, one is drawn for all epochs."""
        if self._seed is None:
            self._seed = draw_seed()
        return iter(self.order_of_epoch(self._seed, self._epoch).tolist())

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, counting from 0."""
        self._epoch = epoch + 1

    def order_of_epoch(self, seed: int, epoch: int) -> torch.Tensor:
        """Return the order of an epoch, a function of a seed and the number of the epoch."""
        choice = self.mixture.datasets_of_epoch(epoch)
        order = torch.empty_like(choice)
        before = self.mixture.samples_before(epoch)
        begin = 0
        for number, (name, size) in enumerate(self.mixture.sizes.items()):
            places = (choice == number).nonzero().flatten()
            first, count = before[name], len(places)
            if count:
                passes = range(first // size, -(-(first + count) // size))
                generators = (generator_with(mix(seed, number, index)) for index in passes)
                orders = [torch.randperm(size, generator=g) if self.shuffle else torch.arange(size) for g in generators]
                start = first - passes.start * size
                order[places] = begin + torch.cat(orders)[start : start + count]
            begin += size
        return order


def _sizes_of(datasets: Mapping[str, IndexedData], advice: str) -> dict[str, int]:
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
        raise TypeError(f"Datasets must be in a dict by name, not a {type(datasets).__name__}.")
    if not datasets:
        raise ValueError("A dict of datasets must have at least one.")


def check_mixture_weights(
    weights: Mapping[str, float], names: list[str], may_be_zero: bool = False
) -> dict[str, float]:
    """Return the weights in the order of the datasets, after checking that each dataset has a positive one.

    Args:
        may_be_zero: whether some, but not all, may be 0
    """
    if not isinstance(weights, Mapping):
        raise TypeError(f"weights must be a dict of numbers by name of the dataset, not {type(weights).__name__}.")
    for name, value in weights.items():
        if name not in names:
            existing = ", ".join(map(repr, names))
            raise ValueError(
                f"weights has {name!r}, which is not one of the datasets {existing}.{did_you_mean(str(name), names)}"
            )
        if not (may_be_zero and value == 0):
            check_range(f"weights[{name!r}]", value, above=0)
    for name in names:
        if name not in weights:
            raise ValueError(f"weights has nothing for the dataset {name!r}. Give it a weight, or leave it out.")
    if not any(weights.values()):
        raise ValueError(f"weights={dict(weights)!r} are all 0. Give at least one dataset a weight.")
    return {name: weights[name] for name in names}


class NamedDatasets(Dataset[Sample]):
    """Several map datasets, by name. A sample is a dict with one sample of each, a batch a dict with one batch of each.

    Args:
        datasets: the datasets by name; when shuffled, they are paired at random in every epoch
        length: length of an epoch: ``"min"`` for that of the shortest dataset, ``"max"`` for that of the longest, with
            the shorter ones repeated

    Raises:
        ValueError: if there are no datasets, or one is empty or has no length
    """

    def __init__(self, datasets: Mapping[str, IndexedData], length: Literal["min", "max"] = "min") -> None:
        check_choice("length", length, ("min", "max"))
        self.sizes = _sizes_of(datasets, "Combine iterable ones into one IterableDataset that yields dicts.")
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
