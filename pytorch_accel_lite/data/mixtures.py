"""Mixtures: training on several datasets by name, each with a share of the samples."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any, Literal

import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Sampler

from pytorch_accel_lite.base.inspection import find_length
from pytorch_accel_lite.base.randomness import mix
from pytorch_accel_lite.base.text import did_you_mean
from pytorch_accel_lite.base.validation import check_choice, check_positive_int, check_range
from pytorch_accel_lite.data.shares import count_global_batches


class Mixture(ConcatDataset[Any]):
    """Several map datasets to train on, by name, each with a share of the samples in every part of an epoch.

    Each dataset is read in passes, each in a new random order: no sample is repeated before the pass is complete, and
    an epoch continues where the previous one ended. Evaluation and prediction read every sample of all datasets once,
    in order.

    :param datasets: the datasets by name
    :param weights: the shares of the samples that come from each dataset, relative to each other; by default their
        lengths, so that an epoch has each sample once
    :param num_samples: length of a training epoch; by default the number of samples in all datasets
    :param mix_batches: whether a batch has samples of all datasets; otherwise all samples of a step, on all processes,
        are from one, whose name is ``trainer.train_dataset_name``
    :param batch_sizes: with ``mix_batches=False``, batch sizes per process by dataset name, where they differ from
        ``per_device_batch_size``
    :raises ValueError: if a dataset is empty or has no length, a name is unknown, or a number is not positive
    """

    def __init__(
        self,
        datasets: Mapping[str, Any],
        weights: Mapping[str, float] | None = None,
        *,
        num_samples: int | None = None,
        mix_batches: bool = True,
        batch_sizes: Mapping[str, int] | None = None,
    ) -> None:
        self.sizes = _sizes_of(datasets, "Mix streams with MixtureStream.")
        super().__init__(datasets.values())
        self.names = list(datasets)
        self.weights = check_weights(self.sizes if weights is None else weights, self.names)
        total = sum(self.sizes.values())
        self.num_samples = total if num_samples is None else check_positive_int("num_samples", num_samples)
        self.mix_batches = mix_batches
        self.batch_sizes = check_by_name("batch_sizes", batch_sizes, self.names, check_positive_int)
        if batch_sizes and mix_batches:
            raise ValueError("batch_sizes are for batches of one dataset each. Pass mix_batches=False, too.")
        self.samples_per_epoch = dict(zip(self.names, self._divide(), strict=True))

    def __repr__(self) -> str:
        shares = ", ".join(f"{name!r}: {count}" for name, count in self.samples_per_epoch.items())
        return f"{type(self).__name__}({{{shares}}} samples in an epoch)"

    def name_of(self, index: int) -> str:
        """Return the name of the dataset that has the sample with an index, one of ``trainer.batch_indices``."""
        return self.names[bisect_right(self.cumulative_sizes, index)]

    def loader_kwargs(self, batch_size: int, shuffle: bool = True, drop_last: bool = False) -> dict[str, Any]:
        """Return the arguments of a ``DataLoader`` that gives a training epoch.

        :param batch_size: batch size per process, unless ``batch_sizes`` has one
        :param shuffle: whether each pass over a dataset has a random order; otherwise it is in order
        :param drop_last: whether to drop smaller last batches
        """
        if self.mix_batches:
            return {"batch_size": batch_size, "sampler": MixtureSampler(self, shuffle), "drop_last": drop_last}
        sizes = [self.batch_sizes.get(name, batch_size) for name in self.names]
        return {"batch_sampler": MixtureBatchSampler(self, sizes, shuffle, drop_last)}

    def _divide(self) -> list[int]:
        """Divide the samples of an epoch in proportion to the weights, by Webster's method (1832)."""
        total = math.fsum(self.weights.values())
        shares = [weight / total for weight in self.weights.values()]
        counts = [max(math.ceil(share * (self.num_samples - len(shares)) - 0.5), 0) for share in shares]
        while sum(counts) < self.num_samples:
            next_one = min(range(len(shares)), key=lambda k: (counts[k] + 0.5) / shares[k])
            counts[next_one] += 1
        if 0 in counts:
            raise ValueError(
                f"The dataset {self.names[counts.index(0)]!r} has so small a weight that none of the "
                f"{self.num_samples} samples of an epoch are from it. Increase its weight or "
                "num_samples, or leave it out."
            )
        return counts


class MixtureSampler(Sampler[int]):
    """Gives the indices of a training epoch in which each dataset of a mixture is spread evenly.

    :param shuffle: whether each pass over a dataset has a random order
    """

    def __init__(self, mixture: Mixture, shuffle: bool) -> None:
        self.mixture = mixture
        self.shuffle = shuffle
        self._epoch = 1
        self._seed: int | None = None

    def __len__(self) -> int:
        return self.mixture.num_samples

    def __iter__(self) -> Iterator[Any]:
        """Give the order of the current epoch; without a seed of the run, one is drawn for all epochs."""
        if self._seed is None:
            self._seed = int(torch.empty((), dtype=torch.int64).random_().item())
        order = self.order_of_epoch(self._seed, self._epoch)
        return iter(order.tolist() if isinstance(order, torch.Tensor) else order)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, counting from 0."""
        self._epoch = epoch + 1

    def order_of_epoch(self, seed: int, epoch: int) -> Any:
        """Return the order of an epoch, a function of a seed and the number of the epoch."""
        samples = self._samples(seed, epoch)
        times = [(torch.arange(len(own), dtype=torch.float64) + 0.5) / len(own) for own in samples]
        return torch.cat(samples)[torch.cat(times).argsort(stable=True)]

    def _samples(self, seed: int, epoch: int) -> list[torch.Tensor]:
        """Return the indices of the samples that each dataset contributes to an epoch."""
        begin = 0
        indices = []
        for number, (name, size) in enumerate(self.mixture.sizes.items()):
            count = self.mixture.samples_per_epoch[name]
            first = (epoch - 1) * count
            passes = range(first // size, -(-(first + count) // size))
            orders = torch.cat([self._order_of_pass(size, mix(seed, number, index)) for index in passes])
            start = first - passes.start * size
            indices.append(begin + orders[start : start + count])
            begin += size
        return indices

    def _order_of_pass(self, size: int, seed: int) -> torch.Tensor:
        if not self.shuffle:
            return torch.arange(size)
        return torch.randperm(size, generator=torch.Generator().manual_seed(seed >> 1))


class MixtureBatchSampler(MixtureSampler):
    """Gives the batches of a training epoch, each from one dataset of a mixture.

    A resumed epoch may continue with other batch sizes: the sizes with which its parts are read are kept in training
    states, and every sample is still read once.

    :param batch_sizes: batch sizes per process, in the order of the datasets
    :param drop_last: whether to drop the last batch of each dataset if it is smaller
    """

    def __init__(self, mixture: Mixture, batch_sizes: list[int], shuffle: bool, drop_last: bool) -> None:
        super().__init__(mixture, shuffle)
        self.batch_sizes = batch_sizes
        self.drop_last = drop_last
        self._parts: list[tuple[int, list[int]]] = []  # first sample and batch sizes of each part of the epoch

    def for_processes(self, world_size: int) -> MixtureBatchSampler:
        """Return a sampler of batches that are divided among a number of processes."""
        sizes = [size * world_size for size in self.batch_sizes]
        return MixtureBatchSampler(self.mixture, sizes, self.shuffle, self.drop_last)

    def name_of_batch(self, batch: list[int]) -> str:
        """Return the name of the dataset that a batch is from."""
        return self.mixture.name_of(batch[0])

    def begin(self, start: int) -> None:
        """Set the number of samples after which the next epoch, if resumed, continues with these batch sizes."""
        if not start or not self._parts:
            self._parts = [(0, self.batch_sizes)]
        elif self._parts[-1][1] != self.batch_sizes:
            self._parts.append((start, self.batch_sizes))

    def state_dict(self) -> dict[str, Any]:
        """Return the sizes of the batches in each part of the epoch."""
        return {"parts": self._parts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the parts of an epoch that is about to be resumed."""
        self._parts = [(start, list(sizes)) for start, sizes in state["parts"]]

    def __len__(self) -> int:
        """Return the number of batches in an epoch that is not resumed with other sizes."""
        counts = zip(self.mixture.samples_per_epoch.values(), self.batch_sizes, strict=True)
        return sum(count_global_batches(count, size, self.drop_last) for count, size in counts)

    def order_of_epoch(self, seed: int, epoch: int) -> Iterator[list[int]]:
        """Yield the batches of an epoch, a function of a seed, the epoch and the batch sizes of its parts."""
        samples = self._samples(seed, epoch)
        used = [0] * len(samples)
        parts = self._parts or [(0, self.batch_sizes)]
        ends = [start for start, _ in parts[1:]]
        for (_, sizes), end in zip(parts, [*ends, None], strict=True):
            for number, size in self._schedule(sizes, used):
                if end is not None and sum(used) >= end:
                    break
                yield samples[number][used[number] : used[number] + size].tolist()
                used[number] += size

    def _schedule(self, sizes: list[int], used: list[int]) -> list[tuple[int, int]]:
        """Return the dataset and the size of each batch in the rest of an epoch, of which some samples are used."""
        batches = []
        for number, (size, done) in enumerate(zip(sizes, used, strict=True)):
            count = self.mixture.samples_per_epoch[self.mixture.names[number]]
            for start in range(done, count, size):
                own = min(size, count - start)
                if own == size or not self.drop_last:
                    batches.append(((start + own / 2) / count, number, own))
        return [(number, own) for _, number, own in sorted(batches)]


def _sizes_of(datasets: Mapping[str, Any], otherwise: str) -> dict[str, int]:
    """Check map datasets by name, and return their lengths.

    :param otherwise: what to do with other datasets
    """
    check_are_named(datasets)
    sizes: dict[str, int] = {}
    for name, dataset in datasets.items():
        is_loader = isinstance(dataset, DataLoader)
        size = None if is_loader or isinstance(dataset, IterableDataset) else find_length(dataset)
        if size is None:
            otherwise = "Pass its dataset." if is_loader else otherwise
            raise ValueError(
                f"The dataset {name!r} ({type(dataset).__name__}) cannot be indexed or has no length. {otherwise}"
            )
        if not size:
            raise ValueError(f"The dataset {name!r} is empty.")
        sizes[name] = size
    return sizes


def check_are_named(datasets: Mapping[str, Any]) -> None:
    """Check that there are datasets, by name."""
    if not isinstance(datasets, Mapping):
        raise TypeError(f"Datasets must be in a dict by name, not a {type(datasets).__name__}.")
    if not datasets:
        raise ValueError("A dict of datasets must have at least one.")


def check_by_name(
    argument: str, values: Mapping[str, Any] | None, names: list[str], check: Callable[[str, Any], Any]
) -> dict[str, Any]:
    """Return the values by name, after checking each, and that its name is that of a dataset."""
    if not isinstance(values, (Mapping, type(None))):
        raise TypeError(f"{argument} must be a dict of numbers by name of the dataset, not {type(values).__name__}.")
    for name, value in (values or {}).items():
        if name not in names:
            known = ", ".join(map(repr, names))
            raise ValueError(
                f"{argument} has {name!r}, which is none of the datasets {known}.{did_you_mean(str(name), names)}"
            )
        check(f"{argument}[{name!r}]", value)
    return dict(values or {})


def check_weights(weights: Mapping[str, float], names: list[str]) -> dict[str, float]:
    """Return the weights in the order of the datasets, after checking that each dataset has a positive one."""
    checked = check_by_name("weights", weights, names, partial(check_range, above=0))
    for name in names:
        if name not in checked:
            raise ValueError(f"weights has nothing for the dataset {name!r}. Give it a weight, or leave it out.")
    return {name: checked[name] for name in names}


class NamedDatasets(Dataset[Any]):
    """Several map datasets, by name. A sample is a dict with one sample of each, a batch a dict with one batch of each.

    :param datasets: the datasets by name; when shuffled, they are paired at random in every epoch
    :param length: length of an epoch: with ``"min"`` that of the shortest dataset, with ``"max"`` that of the longest,
        while the shorter ones are repeated
    :raises ValueError: if there are no datasets, or one is empty or has no length
    """

    def __init__(self, datasets: Mapping[str, Any], length: Literal["min", "max"] = "min") -> None:
        check_choice("length", length, ("min", "max"))
        self.sizes = _sizes_of(datasets, "Combine iterable ones into one IterableDataset that yields dicts.")
        self.datasets = dict(datasets)
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
