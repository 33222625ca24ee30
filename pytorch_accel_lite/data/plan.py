"""The arithmetic of sharing an epoch over processes and batches. Pure functions of integers."""

from __future__ import annotations

from collections.abc import Iterator


def split(begin: int, end: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return the part of the positions ``begin:end`` that falls to a rank, as even and contiguous as possible.

    The first ``(end - begin) % world_size`` ranks get one more; with fewer positions than ranks, the last ranks
    get none.
    """
    quotient, remainder = divmod(end - begin, world_size)
    start = begin + rank * quotient + min(rank, remainder)
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
    begin = start
    while begin < num_samples:
        end = min(begin + global_batch, num_samples)
        rest = num_samples - end
        if drop_last and end - begin < global_batch:
            return
        if not drop_last and 0 < rest < at_least and num_samples - begin >= 2 * at_least:
            end = begin + (num_samples - begin + 1) // 2
        yield begin, end
        begin = end
