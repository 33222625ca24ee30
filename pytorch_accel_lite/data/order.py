"""The order of the samples in an epoch, and how a dataset is read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import ConcatDataset, Dataset, RandomSampler, SequentialSampler, StackDataset, Subset

from pytorch_accel_lite.base.randomness import mix, preserving_generators, seed_generators
from pytorch_accel_lite.data.samplers import draw_from
from pytorch_accel_lite.distributed import Ranks

#: Number of samples up to which a random order is torch's own, which takes 4 bytes for each on every process. Larger
#: ones are computed, see :class:`~pytorch_accel_lite.data.computed_order.ComputedOrder`.
LARGEST_STORED = 10**7
_BLOCK = 1 << 14  # samples


def inner_datasets(dataset: Any) -> list[Any]:
    """Return the datasets inside one of torch's dataset wrappers; an empty list for any other dataset."""
    reads_many = getattr(type(dataset), "__getitems__", None)
    if reads_many is Subset.__getitems__:
        return [dataset.dataset]
    is_concatenation = isinstance(dataset, ConcatDataset) and type(dataset).__getitem__ is ConcatDataset.__getitem__
    if reads_many is StackDataset.__getitems__ or is_concatenation:
        return list(dataset.datasets.values() if isinstance(dataset.datasets, dict) else dataset.datasets)
    return []


def reads_batches(dataset: Any) -> bool:
    """Whether a dataset reads many samples at once; torch's wrappers always have ``__getitems__``, so look inside."""
    inner = inner_datasets(dataset)
    has_method = callable(getattr(dataset, "__getitems__", None))
    return has_method and (not inner or any(map(reads_batches, inner)))


class WithOwnSampler(Dataset[Any]):
    """A dataset that is read with a sampler of its own."""

    def create_sampler(self, shuffle: bool) -> Iterable[Any]:
        """Return the sampler, for a random order or a sequential one."""
        raise NotImplementedError


def draw_order(sampler: Any, ranks: Ranks, seed: int | None, epoch: int, reported: int) -> Any:
    """Return the order of an epoch from a sampler of indices or of batches of indices, the same on all ranks.

    With a seed, the order is a function of (seed, epoch); without one, it is drawn on rank 0 from torch's generator.

    :param reported: what the sampler's ``set_epoch`` is given
    :return: an iterable or, for very many samples in random order, a :class:`ComputedOrder`
    """
    if type(sampler) is SequentialSampler:
        return range(len(sampler))
    if not _is_plain_shuffle(sampler):
        return draw_from(sampler, ranks, seed, epoch, reported)
    if seed is None:
        return _shuffled(len(sampler), ranks.broadcast_object(_draw_seed))
    with preserving_generators():
        seed_generators(mix(seed, epoch))
        return _shuffled(len(sampler), _draw_seed())


def _is_plain_shuffle(sampler: Any) -> bool:
    """Whether a sampler is the one that ``DataLoader(shuffle=True)`` creates."""
    is_random = type(sampler) is RandomSampler and sampler.generator is None and not sampler.replacement
    return is_random and len(sampler) == len(sampler.data_source)


def _draw_seed() -> int:
    """Draw the seed of an order, as a plain ``RandomSampler`` does."""
    return int(torch.empty((), dtype=torch.int64).random_().item())


def _shuffled(size: int, seed: int) -> torch.Tensor | ComputedOrder:
    """Return the order that a plain ``RandomSampler`` draws with a seed, as a tensor, or a computed one."""
    if size > LARGEST_STORED:
        return ComputedOrder(size, seed)
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


def indices_at(order: Any, bounds: Iterable[tuple[int, int]]) -> Iterator[torch.Tensor]:
    """Return the indices of each step, between these bounds, which follow each other, in an order of the epoch.

    Indices are computed or copied for many steps at once, which costs a step little, whatever the number of samples.

    :param order: a tensor, a range from 0, or a computed order
    """
    return chain.from_iterable(_blocks(order, iter(bounds)))


def _blocks(order: Any, bounds: Iterator[tuple[int, int]]) -> Iterator[Sequence[torch.Tensor]]:
    for first in bounds:
        more = islice(bounds, max(_BLOCK // max(first[1] - first[0], 1) - 1, 0))
        begin = end = first[0]
        sizes = [(end := bound[1]) - bound[0] for bound in chain([first], more)]
        if isinstance(order, torch.Tensor):
            indices = order[begin:end].long()
        elif isinstance(order, range):
            indices = torch.arange(begin, end)
        else:
            indices = order.at(begin, end)
        yield indices.split(sizes)  # type: ignore[no-untyped-call]


_ROUNDS = 8
_Numbers = npt.NDArray[np.uint64]


class ComputedOrder:
    """A pseudo-random permutation of ``range(size)`` that follows from a key and takes no memory.

    Each place is encrypted to the index of a sample by a Feistel network over the fewest bits that can hold all indices
    (Luby and Rackoff 1988, as used for shuffling by Mitchell et al. 2021, "Bandwidth-Optimal Random Shuffling for
    GPUs"), again and again until the result is an index, which takes less than two times on average (cycle walking,
    Black and Rogaway 2002). The round function is the finaliser of SplitMix64. It is no cipher: the order is
    random enough to train with, not to hide anything.
    """

    def __init__(self, size: int, key: int) -> None:
        self._size = size
        self._bits = max((size - 1).bit_length(), 2)
        self._keys = [np.uint64(mix(key, number)) for number in range(_ROUNDS)]

    def at(self, begin: int, end: int) -> torch.Tensor:
        """Return the indices at the places from ``begin`` to ``end``."""
        indices = self._encrypt(np.arange(begin, end, dtype=np.uint64))
        while (outside := np.flatnonzero(indices >= self._size)).size:
            indices[outside] = self._encrypt(indices[outside])
        return torch.from_numpy(indices.astype(np.int64))

    def _encrypt(self, numbers: _Numbers) -> _Numbers:
        """Permute the numbers below ``2**bits``: each round mixes one half into the other and swaps the two."""
        left = self._bits // 2
        right = self._bits - left
        for key in self._keys:
            low = numbers & np.uint64((1 << right) - 1)
            high = (numbers >> np.uint64(right)) ^ (_scrambled(low, key) & np.uint64((1 << left) - 1))
            numbers = (low << np.uint64(left)) | high
            left, right = right, left
        return numbers


def _scrambled(numbers: _Numbers, key: np.uint64) -> _Numbers:
    numbers = numbers + key
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    scrambled: _Numbers = numbers ^ (numbers >> np.uint64(31))
    return scrambled
