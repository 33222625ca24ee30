"""Mixtures: training on several datasets by name, each with a share of the samples."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping

import torch
from torch.utils.data import ConcatDataset, Sampler

from pytorch_accel_lite.extension_tools.arguments_and_errors import check_positive_int
from pytorch_accel_lite.extension_tools.data_and_batches import (
    IndexedData,
    LoaderKwargs,
    Sample,
    Source,
    TrainingOrder,
    sizes_of,
)
from pytorch_accel_lite.extension_tools.plain_types import StateDict
from pytorch_accel_lite.extension_tools.random_numbers import derive_seed, draw_seed, generator_with
from pytorch_accel_lite.extensions.mixtures.mixture_weights import (
    Stretch,
    added_up,
    check_mixture_weights,
    choose_all,
    divide,
    whole_epoch,
)


class Mixture(ConcatDataset[Sample], TrainingOrder):
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
        sizes: the number of samples in each dataset, by name
        names: the names of the datasets, in order
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
        self.sizes = sizes_of(datasets, "Mix streams with MixtureStream.")
        parts: list[Source] = [*datasets.values()]
        super().__init__(parts)
        self.names = list(datasets)
        total = sum(self.sizes.values())
        self.num_samples = total if num_samples is None else check_positive_int("num_samples", num_samples)
        self.stages: dict[int, dict[str, float]] = {}
        self._counts: dict[int, list[int]] = {}  # samples in an epoch, by the first epoch of each stage
        self._changed: dict[int, list[Stretch]] = {}  # epochs in which weights change
        self._counted: dict[int, list[int]] = {}  # samples in changed epochs that have been counted
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
        counts = self._samples_by_dataset()
        self.samples_per_epoch = dict(zip(self.names, counts, strict=True))
        stretches = [stretch for stretch in self._stretches_of(epoch) if stretch.begin < begin]
        first = epoch + bool(begin)
        self._changed = {number: kept for number, kept in self._changed.items() if number < epoch}
        if begin:
            self._changed[epoch] = [*stretches, stretches[-1].followed_by(begin, self._shares, self.num_samples)]
        self._counted = {number: kept for number, kept in self._counted.items() if number < epoch}
        earlier = {number: stage for number, stage in self._counts.items() if number < first}
        self._counts = earlier | {first: counts}
        self.stages = {number: self.stages[number] for number in earlier} | {first: self.weights}

    def samples_before(self, epoch: int) -> dict[str, int]:
        """Return the number of samples of each dataset before an epoch."""
        for number, stretches in self._changed.items():  # which stay: another run may read the epochs again
            if number < epoch and number not in self._counted:
                choice = choose_all(stretches, self.num_samples)
                self._counted[number] = choice.bincount(minlength=len(self.names)).tolist()
        return dict(zip(self.names, added_up(self._counts, self._counted, epoch), strict=True))

    def datasets_of_epoch(self, epoch: int) -> torch.Tensor:
        """Return the number of the dataset of each sample in an epoch."""
        return choose_all(self._stretches_of(epoch), self.num_samples)

    def state_of_weights(self) -> StateDict:
        """Return the weights so far and the positions of their changes, for ``load_state_of_weights()``."""
        return {
            "stages": [[first, dict(weights)] for first, weights in self.stages.items()],
            "ended": [[epoch, counts] for epoch, counts in self._counted.items()],
            "changed": [[epoch, [list(stretch) for stretch in parts]] for epoch, parts in self._changed.items()],
        }

    def load_state_of_weights(self, state: StateDict) -> None:
        """Continue with the weights of a state.

        Raises:
            ValueError: if it belongs to other datasets
        """
        for first, weights in state["stages"]:
            self.change_weights(weights, first)
        self._counted = dict(state.get("ended", ()))
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
        return {"batch_size": batch_size, "sampler": self.create_training_sampler(shuffle), "drop_last": drop_last}

    def create_training_sampler(self, shuffle: bool = True) -> MixtureSampler:
        """Return the sampler with which a trainer reads a training epoch."""
        return MixtureSampler(self, shuffle)

    @property
    def _shares(self) -> list[float]:
        total = math.fsum(self.weights.values())
        return [weight / total for weight in self.weights.values()]

    def _samples_by_dataset(self) -> list[int]:
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
        mixture: the datasets, with their shares
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
                generators = (generator_with(derive_seed(seed, number, index)) for index in passes)
                orders = [torch.randperm(size, generator=g) if self.shuffle else torch.arange(size) for g in generators]
                start = first - passes.start * size
                order[places] = begin + torch.cat(orders)[start : start + count]
            begin += size
        return order
