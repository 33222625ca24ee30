"""The arithmetic of sharing an epoch over processes and batches. Pure functions of integers."""

from __future__ import annotations

from collections.abc import Iterator


def split(size: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return the bounds of the part of so many positions that falls to a rank, as even and contiguous as possible.

    The first ``size % world_size`` ranks get one more; with fewer positions than ranks, the last ranks get none.
    """
    quotient, remainder = divmod(size, world_size)
    start = rank * quotient + min(rank, remainder)
    return start, start + quotient + (rank < remainder)


def count_global_batches(num_samples: int, global_batch: int, drop_last: bool = False) -> int:
    """Return how many steps an epoch has."""
    return num_samples // global_batch if drop_last else -(-num_samples // global_batch)


def global_batches(
    num_samples: int, global_batch: int, start: int = 0, drop_last: bool = False, at_least: int = 1
) -> Iterator[tuple[int, int]]:
    """Yield the bounds of each step's samples, of all ranks together, in the order of the epoch.

    :param num_samples: samples in the epoch
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
