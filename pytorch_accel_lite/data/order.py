"""The order of the samples in an epoch, and the randomness inside a dataset."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    StackDataset,
    Subset,
)

from pytorch_accel_lite.distributed import Ranks
from pytorch_accel_lite.randomness import (
    capture_generators,
    mix,
    preserving_generators,
    restore_generators,
    seed_generators,
)
from pytorch_accel_lite.utils import find_length

#: Number of indices drawn at a time from a sampler without a length.
_PIECE = 1024


def inner_datasets(dataset: Any) -> list[Any]:
    """Return the datasets inside one of torch's dataset wrappers; an empty list for any other dataset."""
    reads_many = getattr(type(dataset), "__getitems__", None)
    if reads_many is Subset.__getitems__:
        return [dataset.dataset]
    if reads_many is StackDataset.__getitems__ or type(dataset) is ConcatDataset:
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


class BatchReader(Dataset[Any]):
    """Reads batches with randomness that is a function of (seed, epoch, position).

    Every sample is read with generators seeded from its place in the epoch's order. A dataset that reads many samples
    at once (``__getitems__``) gets one seed for them, and collating a batch continues from there. So the number of
    workers, the number of processes and interruptions do not affect what is read.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._reads_batches = reads_batches(dataset)

    def __getitems__(self, share: tuple[int, int, list[Any]]) -> Any:
        """Return the samples of a share.

        :param share: the mixed seed and epoch, the position of the first sample, and the indices of the samples
        """
        place, first, indices = share
        if self._reads_batches:
            seed_generators(mix(first, after=place))
            return self.dataset.__getitems__(indices)
        samples = []
        for position, index in enumerate(indices, first):
            seed_generators(mix(position, after=place))
            samples.append(self.dataset[index])
        return samples


def of_all_processes(sampler: Any) -> Any:
    """Return a sampler for all processes: a ``DistributedSampler`` would shard an order that is sharded here."""
    if isinstance(sampler, DistributedSampler):
        # No sample is repeated to pad shares; what its drop_last leaves out stays out.
        size = sampler.total_size if sampler.drop_last else len(sampler.dataset)  # type: ignore[arg-type]
        sampler = copy.copy(sampler)
        sampler.num_replicas = 1
        sampler.rank = 0
        sampler.num_samples = size
        sampler.total_size = size
    elif type(sampler) is BatchSampler and isinstance(sampler.sampler, DistributedSampler):
        return BatchSampler(of_all_processes(sampler.sampler), sampler.batch_size, sampler.drop_last)
    return sampler


def draw_order(sampler: Any, ranks: Ranks, seed: int | None, epoch: int) -> Iterable[Any]:
    """Return the order of an epoch from a sampler of indices or of batches of indices, the same on all ranks.

    With a seed, the order is a function of (seed, epoch); without one, it is drawn on rank 0 from torch's generator. A
    sampler without a length may be endless and is drawn in pieces.
    """
    if isinstance(sampler, SequentialSampler):
        return range(len(sampler))
    inner = getattr(sampler, "sampler", sampler) if isinstance(sampler, BatchSampler) else sampler
    set_epoch = getattr(sampler, "set_epoch", None) or getattr(inner, "set_epoch", None)
    if set_epoch is not None:
        set_epoch(epoch)
    is_shuffle = _is_plain_shuffle(sampler)
    if seed is None:
        if ranks.world_size == 1:
            return _shuffled(sampler) if is_shuffle else sampler
        if find_length(sampler) is None:
            return _share_pieces(sampler, ranks)
        return ranks.broadcast_object(lambda: list(sampler))
    seed = mix(seed, epoch)
    generator = getattr(inner, "generator", None)
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed >> 1)
    if find_length(sampler) is None:
        return _draw_pieces(sampler, seed)
    with preserving_generators():
        seed_generators(seed)
        return _shuffled(sampler) if is_shuffle else list(sampler)


def _share_pieces(sampler: Iterable[Any], ranks: Ranks) -> Iterator[Any]:
    """Return the indices that the sampler draws on rank 0. All ranks need each piece at the same step."""
    drawn = chain.from_iterable([sampler])
    pieces = iter(lambda: ranks.broadcast_object(lambda: list(islice(drawn, _PIECE))), [])
    return chain.from_iterable(pieces)


def _draw_pieces(sampler: Iterable[Any], seed: int) -> Iterator[Any]:
    """Yield indices drawn from separate random generators, whose states carry over from piece to piece."""
    with preserving_generators():
        seed_generators(seed)
        drawn = iter(sampler)
        states = capture_generators()
    while True:
        with preserving_generators():
            restore_generators(states)
            piece = list(islice(drawn, _PIECE))
            states = capture_generators()
        if not piece:
            return
        yield from piece


def _is_plain_shuffle(sampler: Any) -> bool:
    """Whether a sampler is the one that ``DataLoader(shuffle=True)`` creates."""
    is_random = type(sampler) is RandomSampler and sampler.generator is None and not sampler.replacement
    return is_random and len(sampler) == len(sampler.data_source)


def _shuffled(sampler: Any) -> torch.Tensor:
    """Return the order of a plain ``RandomSampler`` as a tensor, consuming the same random numbers."""
    generator = torch.Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    return torch.randperm(len(sampler), generator=generator)
