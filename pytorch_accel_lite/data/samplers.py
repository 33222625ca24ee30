"""Samplers other than those of torch's ``DataLoader``: the users' own, and those of mixtures."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DistributedSampler

from pytorch_accel_lite.base.inspection import find_length
from pytorch_accel_lite.base.randomness import (
    capture_generators,
    mix,
    preserving_generators,
    restore_generators,
    seed_generators,
)
from pytorch_accel_lite.data.consistency import check_same_order
from pytorch_accel_lite.data.plan import WrongLengthError
from pytorch_accel_lite.distributed import Ranks

#: Number of indices drawn at a time from a sampler without a length.
_PIECE = 1024
#: Names of the number of parts that a sampler of another package divides its order into, and of the part that it gives.
_NAMES_OF_PARTS = (
    ("num_replicas", "rank"),  # timm, transformers
    ("num_processes", "process_index"),  # Accelerate
    ("world_size", "rank"),
    ("_world_size", "_rank"),  # detectron2
)


def of_all_processes(sampler: Any, world_size: int, splits_batches: bool = False) -> Any:
    """Return a sampler for all processes: a ``DistributedSampler`` would shard an order that is sharded here.

    :param splits_batches: whether its batches are those of all processes together
    :raises ValueError: with several processes, if another sampler gives a part of its order only
    """
    if hasattr(sampler, "for_processes"):  # of the batches of a mixture
        return sampler.for_processes(1 if splits_batches else world_size)
    if isinstance(sampler, DistributedSampler):
        # No sample is repeated to pad shares; what its drop_last leaves out stays out.
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
    parts = parts_of(sampler)
    if world_size > 1 and parts > 1:
        raise ValueError(
            f"The sampler {type(sampler).__name__} gives one of {parts} parts of its order. Each process would read "
            "only a share of its part, so most of the data would be lost. Pass a sampler that gives the whole order on "
            "every process: the trainer shards it. If each process should read its own part, return "
            "OwnShard(DataLoader(...)) from create_train_dataloader or create_eval_dataloader."
        )
    return sampler


def parts_of(sampler: Any) -> int:
    """Return how many parts a sampler, or one inside it, divides its order into, of which it gives one."""
    for of_all, own in _NAMES_OF_PARTS:
        parts = getattr(sampler, of_all, None)
        if isinstance(parts, int) and parts > 1 and hasattr(sampler, own):
            return parts
    inner = [getattr(sampler, name, None) for name in ("sampler", "batch_sampler")]
    return max((parts_of(part) for part in inner if part is not None), default=1)


def draw_from(sampler: Any, ranks: Ranks, seed: int | None, epoch: int, reported: int) -> Iterable[Any]:
    """Return the order of an epoch from a sampler, see :func:`~pytorch_accel_lite.data.order.draw_order`.

    A sampler without a length may be endless and is drawn in pieces.
    """
    inner = getattr(sampler, "sampler", sampler)  # of a batch sampler
    set_epoch = getattr(sampler, "set_epoch", None) or getattr(inner, "set_epoch", None)
    if set_epoch is not None:
        set_epoch(reported)
    if seed is None:
        if ranks.world_size == 1:
            return sampler  # type: ignore[no-any-return]
        if find_length(sampler) is None:
            return _share_pieces(sampler, ranks)
        return ranks.broadcast_object(lambda: list(sampler))
    if hasattr(sampler, "order_of_epoch"):  # of a mixture, which continues from epoch to epoch
        return sampler.order_of_epoch(seed, epoch)  # type: ignore[no-any-return]
    seed = mix(seed, epoch)
    generator = getattr(inner, "generator", None)
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed >> 1)
    if find_length(sampler) is None:
        return _draw_pieces(sampler, seed, ranks)
    with preserving_generators():
        seed_generators(seed)
        return list(sampler)


def wrong_length(sampler: object, size: int, given: int) -> WrongLengthError:
    """Return the error for a sampler that does not give as many indices as its length."""
    return WrongLengthError(
        f"The sampler {type(sampler).__name__} gives {given} indices, but its length is {size}. Make its __len__ "
        "return the number of indices that it gives."
    )


def no_indices(given: torch.Tensor) -> TypeError:
    """Return the error for indices that are no integers."""
    return TypeError(
        f"Indices of samples, of a Subset or a sampler, must be integers, not {given.dtype} as in "
        f"{given.flatten()[:4].tolist()}. Convert a mask by torch.as_tensor(mask).nonzero().flatten()."
    )


def in_turn(sampler: Any, order: Iterable[Any], start: int, sizes: list[int]) -> Iterator[Any]:
    """Yield the indices of each step in turn, checking the length reported by the sampler."""
    size = len(sampler)
    rest = islice(order, start, None)
    position = start
    for count in sizes:
        indices = list(islice(rest, count))
        position += len(indices)
        if len(indices) < count:
            raise wrong_length(sampler, size, position)
        yield indices
    if position == size and list(islice(rest, 1)):  # the sampler may be endless
        warnings.warn(
            f"The sampler {type(sampler).__name__} gives more indices than its length of {size}, at which the epoch "
            "ends.",
            stacklevel=2,
        )


def _share_pieces(sampler: Iterable[Any], ranks: Ranks) -> Iterator[Any]:
    """Return the indices that the sampler draws on rank 0. All ranks need each piece at the same step."""
    drawn = chain.from_iterable([sampler])
    pieces = iter(lambda: ranks.broadcast_object(lambda: list(islice(drawn, _PIECE))), [])
    return chain.from_iterable(pieces)


def _draw_pieces(sampler: Iterable[Any], seed: int, ranks: Ranks) -> Iterator[Any]:
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
        check_same_order(sampler, piece, ranks)
        if not piece:
            return
        yield from piece
