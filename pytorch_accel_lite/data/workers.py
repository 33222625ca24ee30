"""Starting the workers of a dataloader."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def start_reading(batches: Iterable[T]) -> Iterator[T]:
    """Return ``iter(batches)``; workers that it forks never finalise what this process has discarded.

    A forked worker inherits its parent's garbage: process groups, the iterators of earlier epochs, trainers. Were they
    collected there, their finalisers would wait for threads and processes that only the parent has, perhaps forever. So
    all that exists when workers are forked is kept out of their garbage collector.
    """
    if not getattr(batches, "num_workers", 0):
        return iter(batches)
    gc.freeze()
    try:
        return iter(batches)
    finally:
        gc.unfreeze()
