"""The order of the samples in an epoch: drawn, computed where there are very many, or of samplers and mixtures."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from pytorch_accel_lite.base.random_generators import (
    capture_generators,
    derive_seed,
    draw_seed,
    find_held_generators,
    preserving_generators,
    restore_generators,
    seed_generators,
    seed_held_generators,
)
from pytorch_accel_lite.data.order_checks import PASS_OWN_SHARD, check_same_order, warn_of_own_parts
from pytorch_accel_lite.data.sources import Index, SamplerLike, find_length
from pytorch_accel_lite.distributed import Ranks

_ROUNDS = 8
_Numbers = npt.NDArray[np.uint64]


class ComputedOrder:
    """A pseudo-random permutation of ``range(size)`` that is computed from a key and takes no memory.

    Each position is encrypted to the index of a sample by a Feistel network over the fewest bits for all indices
    (Luby and Rackoff 1988, as used for shuffling by Mitchell et al. 2021, "Bandwidth-Optimal Random Shuffling for
    GPUs"), again and again until the result is an index, which takes less than two times on average (cycle walking,
    Black and Rogaway 2002). The round function is the finaliser of SplitMix64. It is not a secure cipher: the order is
    random enough for training, but hides nothing.
    """

    def __init__(self, size: int, key: int) -> None:
        self._size = size
        self._bits = max((size - 1).bit_length(), 2)
        self._keys = [np.uint64(derive_seed(key, number)) for number in range(_ROUNDS)]

    def at(self, begin: int, end: int) -> torch.Tensor:
        """Return the indices at the positions from ``begin`` to ``end``."""
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


#: Number of samples up to which a random order is drawn by torch, which takes 4 bytes per sample on every process.
#: Larger ones are computed (``ComputedOrder``).
LARGEST_STORED = 10**7
#: Samplers that give no lists, and many indices.
_OF_SINGLE_SAMPLES = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
#: Number of indices drawn at a time from a sampler without a length.
_PIECE = 1024
#: Attributes of other packages' samplers for the number of parts of their order, and for the index of their part.
_PART_ATTRIBUTES = (
    ("num_replicas", "rank"),  # timm, transformers
    ("num_processes", "process_index"),  # Accelerate
    ("world_size", "rank"),
    ("_world_size", "_rank"),  # detectron2
)


#: An order of an epoch: an iterable of indices, or of batches of them, or a ``ComputedOrder``.
Order: TypeAlias = Any


def draw_order(sampler: SamplerLike, ranks: Ranks, seed: int | None, epoch: int, reported: int) -> Order:
    """Return the order of an epoch from a sampler of indices or of batches, the same on all ranks.

    With a seed, the order is a function of (seed, epoch); without one, it is drawn on rank 0 from torch's generator.

    Args:
        reported: the epoch that is passed to the sampler's ``set_epoch``

    Returns:
        an iterable or, for very many samples in random order, a ``ComputedOrder``
    """
    if type(sampler) is SequentialSampler:
        return range(len(sampler))
    is_random = type(sampler) is RandomSampler and sampler.generator is None and not sampler.replacement
    if not is_random or len(sampler) != len(sampler.data_source):  # not as DataLoader(shuffle=True) creates it
        return _draw_from(sampler, ranks, seed, epoch, reported)
    if seed is None:
        return _shuffled(len(sampler), ranks.result_of_first(draw_seed))
    with preserving_generators():
        seed_generators(derive_seed(seed, epoch))
        return _shuffled(len(sampler), draw_seed())


def _shuffled(size: int, seed: int) -> torch.Tensor | ComputedOrder:
    """Return the order that a plain ``RandomSampler`` draws with a seed; for many samples, a computed order."""
    if size > LARGEST_STORED:
        return ComputedOrder(size, seed)
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


def _draw_from(sampler: SamplerLike, ranks: Ranks, seed: int | None, epoch: int, reported: int) -> Iterable[Index]:
    """Return the order of an epoch from any other sampler. Without a length, the order is drawn in pieces."""
    if seed is None:
        set_sampler_epoch(sampler, reported)
        if ranks.world_size == 1:
            return sampler if type(sampler) is RandomSampler else _drawn(sampler)
        if find_length(sampler) is None:
            return _share_pieces(sampler, ranks)
        generators = ranks.result_of_first(capture_generators) if epoch <= 1 else None
        order: list[Index] = ranks.result_of_first(lambda: list(_drawn(sampler)))
        if generators is not None:
            warn_of_own_parts(sampler, order, generators, ranks)
        return order
    if hasattr(sampler, "order_of_epoch"):  # a mixture's order continues from epoch to epoch
        set_sampler_epoch(sampler, reported)
        return sampler.order_of_epoch(seed, epoch)  # type: ignore[no-any-return]
    if find_length(sampler) is None:
        return _draw_pieces(sampler, _seed_sampler(sampler, seed, epoch, reported), ranks)
    return order_of_sampler(sampler, seed, epoch, reported)


def order_of_sampler(sampler: SamplerLike, seed: int, epoch: int, reported: int) -> list[Index]:
    """Return the order of an epoch that a user's sampler draws with a seed."""
    seed = _seed_sampler(sampler, seed, epoch, reported)
    with preserving_generators():
        seed_generators(seed)
        return list(_drawn(sampler))


def _drawn(sampler: Iterable[Index]) -> Iterator[Index]:
    """Begin the iteration of a sampler; its batches are copied."""
    return iter(sampler) if type(sampler) in _OF_SINGLE_SAMPLES else map(_copied, sampler)


def _copied(index: Index) -> Index:
    """Return an index, or a copy of a batch, as a batch sampler may fill the same list for each."""
    return index.copy() if isinstance(index, list) else index


def set_sampler_epoch(sampler: SamplerLike, reported: int) -> None:
    """Call ``set_epoch`` of a sampler, or of the sampler inside a batch sampler."""
    inner = getattr(sampler, "sampler", sampler)
    set_epoch = getattr(sampler, "set_epoch", None) or getattr(inner, "set_epoch", None)
    if set_epoch is not None:
        set_epoch(reported)


def _seed_sampler(sampler: SamplerLike, seed: int, epoch: int, reported: int) -> int:
    """Pass a sampler the epoch, seed the generators that it holds itself, and return the seed for global generators."""
    set_sampler_epoch(sampler, reported)
    seed = derive_seed(seed, epoch)
    seed_held_generators(find_held_generators([sampler]), seed)
    generator = getattr(getattr(sampler, "sampler", sampler), "generator", None)
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed >> 1)
    return seed


def _share_pieces(sampler: Iterable[Index], ranks: Ranks) -> Iterator[Index]:
    """Yield the indices that the sampler draws on rank 0. All ranks need each piece at the same step."""

    def draw() -> Iterator[Index]:
        yield from _drawn(sampler)

    drawn = draw()
    while piece := ranks.result_of_first(lambda: list(islice(drawn, _PIECE))):
        yield from piece


def _draw_pieces(sampler: Iterable[Index], seed: int, ranks: Ranks) -> Iterator[Index]:
    """Yield indices drawn from separate random generators, whose states carry over from piece to piece."""
    with preserving_generators():
        seed_generators(seed)
        drawn = _drawn(sampler)
        states = capture_generators()
    while True:
        with preserving_generators():
            restore_generators(states)
            piece = list(islice(drawn, _PIECE))
            states = capture_generators()
        check_same_order(sampler, piece, ranks)
        if not piece:
            return
        yield from piece


def of_all_processes(sampler: SamplerLike, world_size: int) -> SamplerLike:
    """Return a sampler of the whole order, which a ``DistributedSampler`` is not: the package shards the order itself.

    Raises:
        ValueError: with several processes, if another sampler gives only a part of its order
    """
    if isinstance(sampler, DistributedSampler):
        # No sample is repeated to pad shares. Samples that the sampler's drop_last leaves out stay out.
        size = sampler.total_size if sampler.drop_last else len(sampler.dataset)  # type: ignore[arg-type]
        sampler = copy.copy(sampler)
        sampler.num_replicas = 1
        sampler.rank = 0
        sampler.num_samples = size
        sampler.total_size = size
        return sampler
    inner = getattr(sampler, "sampler", None)
    if isinstance(sampler, BatchSampler) and isinstance(inner, DistributedSampler):
        sampler = copy.copy(sampler)
        sampler.sampler = of_all_processes(inner, world_size)
    parts = parts_of_order(sampler)
    if world_size > 1 and parts > 1:
        raise ValueError(
            f"The sampler {type(sampler).__name__} gives one of {parts} parts of its order. Each process would read "
            "only a share of its part, so most of the data would be lost. Pass a sampler that gives the whole order on "
            f"every process: the trainer shards it. {PASS_OWN_SHARD}"
        )
    return sampler


def parts_of_order(sampler: SamplerLike) -> int:
    """Return the number of parts into which a sampler, or one inside it, divides its order."""
    parts = [getattr(sampler, count, 1) for count, index in _PART_ATTRIBUTES if hasattr(sampler, index)]
    inner = [getattr(sampler, name, None) for name in ("sampler", "batch_sampler")]
    parts += [parts_of_order(part) for part in inner if part is not None]
    return max((part for part in parts if isinstance(part, int)), default=1)
