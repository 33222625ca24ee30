"""The seeds of workers and samples, so that random numbers are a function of the seed, the epoch and the position."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from pytorch_accel_lite.base.random_generators import (
    derive_seed,
    find_held_generators,
    generator_with,
    seed_generators,
    seed_held_generators,
)
from pytorch_accel_lite.base.reachable_objects import RandomGenerator
from pytorch_accel_lite.data.reading import SampleReader, reads_batches
from pytorch_accel_lite.data.sources import BatchData, CollateFunction, Index, Source

#: The seed of a share, which is that of its first sample; the seed of the epoch, from which those of its other samples
#: are derived; the position of the first sample; the indices of the samples.
SeededShare = tuple[int, int, int, list[Index]]
#: The generators whose draws are distinguished: torch's, and those of Python and NumPy.
_TORCH, _OTHERS = "torch", "others"
_NONE: frozenset[str] = frozenset()
_ALL = frozenset({_TORCH, _OTHERS})
#: Functions that read the state of a generator, each with the kind of the generator.
_ASKS = [
    (vars(random), "getstate", _OTHERS),
    (vars(np.random), "get_state", _OTHERS),
    *((vars(module), name, _TORCH) for module in (torch, torch.random) for name in ("get_rng_state", "initial_seed")),
]
#: A known seed, and the first numbers that the generators of Python and NumPy draw after it.
_KNOWN = 1
_FIRST_DRAWN = random.Random(_KNOWN).random(), np.random.RandomState(_KNOWN).random_sample()


def generator_of_loader(seed: int | None, given: torch.Generator | None) -> torch.Generator | None:
    """Return the generator of a ``DataLoader``, from which it draws the seeds of its workers: with a seed, a new one.

    Args:
        given: the generator that a user passed to the ``DataLoader``, which is used if there is no seed
    """
    return given if seed is None else generator_with(derive_seed(seed))


class SeededReader(SampleReader):
    """Reads and collates batches with randomness that is a function of (seed, epoch, position).

    Every sample is read with generators seeded from its place in the epoch's order. Collating a batch continues from
    its last sample. A dataset that reads many samples at once (``__getitems__``) gets one seed for all of them. So the
    number of workers, the number of processes and interruptions do not affect the data.

    Seeding takes longer than reading most samples. If the first batch has neither drawn from a generator nor asked for
    its state, the generator is only watched in later batches. If a later batch draws from it after all, that batch is
    read again, and from then on every sample gets its seed. Reading does not change torch's generator. Generators that
    the dataset and the collate function hold themselves, such as those of transforms, get the seed of each sample, too.
    If they are made while the first batch is read, it is read again.

    Args:
        dataset: the map dataset
        collate: makes a batch of samples
    """

    def __init__(self, dataset: Source, collate: CollateFunction) -> None:
        super().__init__(dataset)
        self._collate = collate
        self._reads_batches = reads_batches(dataset)
        self._by_samples: frozenset[str] | None = None  # the generators that samples draw from, once known
        self._by_collating = _NONE  # further generators that collating draws from
        self._held: list[RandomGenerator] | None = None  # generators of the dataset, found where it is read
        self._asks = _Asks()

    def __getitems__(self, share: SeededShare) -> BatchData:  # type: ignore[override]
        """Return the batch of a share."""
        is_first = self._held is None
        if is_first:
            self._held = find_held_generators([self.dataset, self._collate])
        state = torch.default_generator.get_state()
        try:
            if self._reads_batches:
                seed_generators(share[0])
                if self._held:
                    seed_held_generators(self._held, share[0])
                batch = self._collate(self.dataset.__getitems__(share[3]))
            elif self._by_samples is None:
                batch = self._read_first(share)
            else:
                batch = self._read(share, self._by_samples, state)
        except BaseException:
            self._held = None if is_first else self._held
            raise
        finally:
            torch.default_generator.set_state(state)
        return self.__getitems__(share) if is_first and self._finds_more() else batch

    def _finds_more(self) -> bool:
        """Search again, and return whether reading has made generators, which had no seed for each sample."""
        before = {*map(id, self._held or ())}
        self._held = find_held_generators([self.dataset, self._collate])
        return not before.issuperset(map(id, self._held))

    def forget_generators(self) -> None:
        """Search the dataset's generators again at the next reading, because they may have been replaced."""
        self._held = None

    def _read_first(self, share: SeededShare) -> BatchData:
        """Return a batch, and note which generators its reading draws from."""
        last = _last_seed(share)
        with self._asks:
            samples = super().__getitems__(self._seeding(share, _ALL))
        drawn = _drawn_since(last) | self._asks.of
        with self._asks:
            batch = self._collate(samples)
        self._by_samples, self._by_collating = drawn, (_drawn_since(last) | self._asks.of) - drawn
        return batch

    def _read(self, share: SeededShare, seeded: frozenset[str], state: torch.Tensor) -> BatchData:
        """Return a batch. It is read again if its samples depend on generators that were not seeded.

        Args:
            seeded: generators that get the seed of each sample
            state: the state of torch's generator
        """
        watched = _ALL - seeded
        if not watched:
            return self._collate(super().__getitems__(self._seeding(share, seeded)))
        if _OTHERS in watched:
            seed_generators(_KNOWN, with_torch=False)
        drawn, error = _NONE, None
        with self._asks:
            try:
                has_seeds = seeded or self._held
                samples = super().__getitems__(self._seeding(share, seeded) if has_seeds else share[3])
                if self._by_collating:
                    drawn = self._drawn_from(self._by_collating, state)
                    watched -= self._by_collating
                    seed_generators(_last_seed(share), _TORCH in self._by_collating, _OTHERS in self._by_collating)
                batch = self._collate(samples)
            except Exception as raised:  # a random number may be the cause
                error = raised
        drawn |= self._drawn_from(watched, state)
        if drawn:
            torch.default_generator.set_state(state)
            self._by_samples = seeded | drawn
            self._by_collating -= drawn
            return self._read(share, self._by_samples, state)
        if error is not None:
            raise error
        return batch

    def _seeding(self, share: SeededShare, generators: frozenset[str]) -> Iterator[Index]:
        """Yield the indices of samples. For each, seed the generators, including those that the dataset holds."""
        _, epoch_seed, first, indices = share
        with_torch, with_others = _TORCH in generators, _OTHERS in generators
        for position, index in enumerate(indices, first):
            seed = derive_seed(position, after=epoch_seed)
            seed_generators(seed, with_torch, with_others)
            if self._held:
                seed_held_generators(self._held, seed)
            yield index

    def _drawn_from(self, watched: frozenset[str], state: torch.Tensor) -> frozenset[str]:
        """Return which of the generators have moved on, or have been asked for their states."""
        drawn = watched & self._asks.of
        if _TORCH in watched:
            now = torch.default_generator.get_state()
            if now.numpy().tobytes() != state.numpy().tobytes():  # faster than torch.equal
                drawn |= {_TORCH}
        if _OTHERS in watched and (random.random(), np.random.random_sample()) != _FIRST_DRAWN:
            drawn |= {_OTHERS}
        return drawn


def as_collated(batch: BatchData) -> BatchData:
    """Return a batch unchanged, because it was collated when it was read."""
    return batch


def _last_seed(share: SeededShare) -> int:
    _, epoch_seed, first, indices = share
    return derive_seed(first + len(indices) - 1, after=epoch_seed)


class _Asks:
    """Notes the generators whose states are read within a block.

    Code that reads a generator's state may depend on it without drawing from it, or restore it afterwards.
    """

    def __init__(self) -> None:
        self.of: set[str] = set()
        self._usual: list[Callable[..., object]] = []
        self._noting = [partial(self._note, generator, number) for number, (_, _, generator) in enumerate(_ASKS)]

    def __enter__(self) -> None:
        self.of.clear()
        self._usual = [names[name] for names, name, _ in _ASKS]
        for (names, name, _), note in zip(_ASKS, self._noting, strict=True):
            names[name] = note

    def __exit__(self, *error: object) -> None:
        for (names, name, _), usual in zip(_ASKS, self._usual, strict=True):
            names[name] = usual

    def _note(self, generator: str, number: int, *args: object, **kwargs: object) -> object:
        self.of.add(generator)
        return self._usual[number](*args, **kwargs)


def _drawn_since(seed: int) -> frozenset[str]:
    """Return the generators from which numbers have been drawn since all were seeded with this seed."""
    before: Any = np.random.RandomState(seed & 0xFFFFFFFF).get_state()
    now: Any = np.random.get_state()
    is_numpy_new = before[2:] == now[2:] and np.array_equal(before[1], now[1])
    is_python_new = random.Random(seed).getstate() == random.getstate()
    is_torch_new = torch.equal(torch.default_generator.get_state(), generator_with(seed).get_state())
    is_new = {_TORCH: is_torch_new, _OTHERS: is_numpy_new and is_python_new}
    return frozenset(name for name, unused in is_new.items() if not unused)
