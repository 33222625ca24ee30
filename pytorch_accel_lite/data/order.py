"""The order in which an epoch visits the samples, and the randomness inside a dataset."""

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

#: What is drawn at a time of a sampler without a length.
_PIECE = 1024


def inner_datasets(dataset: Any) -> list[Any]:
    """Return what one of torch's own wrappers of datasets reads from; nothing for any other dataset."""
    reads_many = getattr(type(dataset), "__getitems__", None)
    if reads_many is Subset.__getitems__:
        return [dataset.dataset]
    if reads_many is StackDataset.__getitems__ or type(dataset) is ConcatDataset:
        return list(dataset.datasets.values() if isinstance(dataset.datasets, dict) else dataset.datasets)
    return []


def reads_batches(dataset: Any) -> bool:
    """Whether a dataset itself reads many samples at once; torch's wrappers have ``__getitems__`` in any case."""
    inner = inner_datasets(dataset)
    has_method = callable(getattr(dataset, "__getitems__", None))
    return has_method and (not inner or any(map(reads_batches, inner)))


class BatchReader(Dataset[Any]):
    """Reads batches with randomness that is a function of (seed, epoch, position).

    Every sample is read with generators seeded from its place in the epoch's order; a dataset that reads many samples
    at once (``__getitems__``) has one seed for them, and collating a batch continues from there. So neither workers,
    nor processes, nor an interruption change what is read.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._reads_batches = reads_batches(dataset)

    def __getitems__(self, share: tuple[int, int, list[Any]]) -> Any:
        """Return the samples of a share: what seed and epoch come to, the position of its first sample, its indices."""
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
    """Return a sampler of the whole job: a ``DistributedSampler`` would share out what is shared out here."""
    if isinstance(sampler, DistributedSampler):
        # Nothing is repeated to fill up shares; what its drop_last leaves out stays left out.
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
    """Return the order of an epoch, the same on all ranks: what a sampler of indices, or of lists of them, gives.

    Without a seed it is what the sampler draws from torch's generator on rank 0; with one, f(seed, epoch). A sampler
    without a length may have no end: it is drawn in pieces.
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
    """Return what the sampler draws on rank 0. All ranks read equally far at each step, so they ask together."""
    drawn = chain.from_iterable([sampler])
    pieces = iter(lambda: ranks.broadcast_object(lambda: list(islice(drawn, _PIECE))), [])
    return chain.from_iterable(pieces)


def _draw_pieces(sampler: Iterable[Any], seed: int) -> Iterator[Any]:
    """Yield what a sampler draws from generators of its own, which go on from piece to piece."""
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
    """Whether a sampler is what ``DataLoader(shuffle=True)`` makes."""
    is_random = type(sampler) is RandomSampler and sampler.generator is None and not sampler.replacement
    return is_random and len(sampler) == len(sampler.data_source)


def _shuffled(sampler: Any) -> torch.Tensor:
    """Return what a plain ``RandomSampler`` gives, drawn as it draws it, as the tensor that it is drawn as."""
    generator = torch.Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    return torch.randperm(len(sampler), generator=generator)
