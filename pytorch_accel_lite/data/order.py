"""The order of the samples in an epoch, and how a dataset is read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import ConcatDataset, Dataset, RandomSampler, SequentialSampler, StackDataset, Subset

from pytorch_accel_lite.base.randomness import mix, preserving_generators, seed_generators
from pytorch_accel_lite.data.computed_order import ComputedOrder
from pytorch_accel_lite.data.samplers import draw_from
from pytorch_accel_lite.distributed import Ranks

if TYPE_CHECKING:
    from pytorch_accel_lite.data.computed_order import ComputedOrder

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
