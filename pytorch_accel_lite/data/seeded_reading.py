"""Reading samples with randomness that is a function of (seed, epoch, position)."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from pytorch_accel_lite.base.randomness import mix, seed_generators
from pytorch_accel_lite.data.order import reads_batches

#: The seed of a share, which is that of its first sample; the mixed seed and epoch, from which those of the others
#: follow; the position of the first sample; the indices of the samples.
SeededShare = tuple[int, int, int, list[Any]]
#: Any seed, and the numbers that the generators of python and numpy draw first after it.
_KNOWN = 1
_FIRST_DRAWN = random.Random(_KNOWN).random(), np.random.RandomState(_KNOWN).random_sample()
_NUM_WATCHED = 8  # samples


class BatchReader(Dataset[Any]):
    """Reads batches with randomness that is a function of (seed, epoch, position).

    Every sample is read with generators seeded from its place in the epoch's order. A dataset that reads many samples
    at once (``__getitems__``) gets one seed for them, and collating a batch continues from there. So the number of
    workers, the number of processes and interruptions do not affect what is read.

    Seeding python's and numpy's generators takes longer than reading many a sample. Where the first samples have drawn
    no number from them, nor asked for their states, the two are only seeded for each batch, such that it is noticed
    when one does nonetheless; the batch is then read again, and from then on every sample is read with its own seed.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._reads_batches = reads_batches(dataset)
        self._draws: bool | None = None  # whether samples draw numbers from python's or numpy's generator, once known

    def __getitems__(self, share: SeededShare) -> Any:
        """Return the samples of a share."""
        seed, place, first, indices = share
        if self._reads_batches:
            seed_generators(seed)
            return self.dataset.__getitems__(indices)
        seeds = [mix(position, after=place) for position in range(first, first + len(indices))]
        if self._draws is False:
            samples = self._read_without_draws(seeds, indices)
            if not self._draws:
                return samples
        return self._read_seeded(seeds, indices)

    def _read_seeded(self, seeds: list[int], indices: list[Any]) -> list[Any]:
        samples: list[Any] = []
        for seed, index in zip(seeds, indices, strict=True):
            seed_generators(seed)
            if self._draws is None and len(samples) < _NUM_WATCHED:
                with _StatesRead() as states:
                    samples.append(self.dataset[index])
                self._draws = states.any or _has_drawn(seed) or None
            else:
                samples.append(self.dataset[index])
        self._draws = bool(self._draws)
        return samples

    def _read_without_draws(self, seeds: list[int], indices: list[Any]) -> list[Any]:
        """Return the samples, and note if reading them has drawn numbers, with which they must not be used."""
        samples = []
        error = None
        seed_generators(_KNOWN, with_torch=False)
        try:
            with _StatesRead() as states:
                for seed, index in zip(seeds, indices, strict=True):
                    torch.default_generator.manual_seed(seed >> 1)  # quick, and torch.initial_seed() can be asked
                    samples.append(self.dataset[index])
        except Exception as raised:
            error = raised
        self._draws = states.any or (random.random(), np.random.random_sample()) != _FIRST_DRAWN
        if error is not None and not self._draws:  # otherwise it may be due to the numbers
            raise error
        seed_generators(seeds[-1], with_torch=False)  # collating continues from the last sample
        return samples


class _StatesRead:
    """Notes whether anything asks for the states of python's or numpy's generators in a block.

    A sample that does so may depend on them, even if it draws no number, or restores the states afterwards.
    """

    any = False

    def __enter__(self) -> _StatesRead:
        self._usual = random.getstate, np.random.get_state
        random.getstate = partial(self._note, random.getstate)
        np.random.get_state = partial(self._note, np.random.get_state)
        return self

    def __exit__(self, *error: object) -> None:
        random.getstate, np.random.get_state = self._usual

    def _note(self, read: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.any = True
        return read(*args, **kwargs)


def _has_drawn(seed: int) -> bool:
    """Whether a number has been drawn from python's or numpy's generator since both were given this seed."""
    before: Any = np.random.RandomState(seed & 0xFFFFFFFF).get_state()
    now: Any = np.random.get_state()
    if random.Random(seed).getstate() != random.getstate() or before[2:] != now[2:]:
        return True
    return not np.array_equal(before[1], now[1])
