"""Sharing an epoch over processes and batches, and finding a place in it. Nothing here knows what a batch is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TypeVar

T = TypeVar("T")


def split(size: int, rank: int, world_size: int, at_least: int = 1) -> tuple[int, int]:
    """Return the bounds of the part of so many positions that falls to a rank, as even and contiguous as possible.

    The first ranks get one more where it is not even; with fewer positions than ranks, the last ranks get none.

    :param at_least: what a rank gets that gets any, unless there are fewer in all; so the last ranks may get none
    """
    sharers = max(min(world_size, size // at_least), 1)
    quotient, remainder = divmod(size, sharers)
    start = min(rank * quotient + min(rank, remainder), size)
    return start, min(start + quotient + (rank < remainder), size)


def count_global_batches(num_samples: int, global_batch: int, drop_last: bool = False) -> int:
    """Return how many steps an epoch has."""
    return num_samples // global_batch if drop_last else -(-num_samples // global_batch)


def ends_in_one(num_samples: int | None, batch: int | None, drop_last: bool) -> bool:
    """Whether the last of an epoch's batches has a single sample, as far as their sizes are known."""
    return bool(num_samples and batch) and not drop_last and num_samples % batch == 1  # type: ignore[operator]


def global_batches(
    num_samples: int, global_batch: int, start: int = 0, drop_last: bool = False, at_least: int = 1
) -> Iterator[tuple[int, int]]:
    """Yield the bounds of each step's samples, of all ranks together, in the order of the epoch.

    :param global_batch: samples in a full step
    :param start: samples of the epoch that have been consumed
    :param drop_last: leave out a last, smaller step
    :param at_least: when fewer than this many samples are left for the last step, it shares evenly with the step
        before it; used in evaluation, where it keeps every rank busy in every step
    """
    while start < num_samples:
        left = num_samples - start
        size = min(global_batch, left)
        if drop_last and size < global_batch:
            return
        if not drop_last and 0 < left - size < at_least and left >= 2 * at_least:
            size = (left + 1) // 2
        yield start, start + size
        start += size


class WrongLengthError(ValueError):
    """What gives the order of an epoch has not as many indices as it said: no batch of it can be skipped."""


def ended(source: str, given: str, done: int) -> WrongLengthError:
    """Return the error for data that end before the place at which a run is resumed."""
    return WrongLengthError(
        f"The {source} ended after {given} of this epoch, but the run that is resumed has had {done} of them. Resume "
        "it with the data that it was saved with."
    )


def with_last(items: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Yield each item with whether it is the last, reading one ahead."""
    iterator = iter(items)
    held = list(islice(iterator, 1))
    for following in iterator:
        yield held.pop(), False
        held.append(following)
    if held:
        yield held.pop(), True


def grouped(items: Iterator[T], size: int) -> Iterator[list[T]]:
    """Yield lists of so many items; the last may be shorter."""
    return iter(lambda: list(islice(items, size)), [])


def skip_samples(
    batches: Iterator[T], start: int, size_of: Callable[[T], int], source: str = "data"
) -> tuple[T, int] | None:
    """Drop so many samples; return the batch in the middle of which they end, with how many of its samples are left."""
    position = 0
    while position < start:
        batch = next(batches, None)
        if batch is None:
            raise ended(source, f"{position} samples", start)
        position += size_of(batch)
        if position > start:
            return batch, position - start
    return None
