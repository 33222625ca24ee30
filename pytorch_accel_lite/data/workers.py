"""Starting the workers of a dataloader."""

from __future__ import annotations

import gc
import signal
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TypeVar

from torch.utils.data import DataLoader

T = TypeVar("T")


def start_reading(batches: Iterable[T]) -> Iterator[T]:
    """Return ``iter(batches)``; the workers of a ``DataLoader`` never finalise what this process has discarded.

    A forked worker inherits its parent's garbage: process groups, the iterators of earlier epochs, trainers. Were they
    collected there, their finalisers would wait for threads and processes that only the parent has, perhaps forever.
    """
    if not isinstance(batches, DataLoader) or not batches.num_workers:
        return iter(batches)
    was_enabled, worker_init_fn = gc.isenabled(), batches.worker_init_fn
    batches.worker_init_fn = partial(_begin, worker_init_fn, was_enabled)
    gc.disable()
    try:
        return iter(batches)
    finally:
        batches.worker_init_fn = worker_init_fn
        if was_enabled:
            gc.enable()


def _begin(worker_init_fn: Callable[[int], object] | None, collects: bool, worker_id: int) -> None:
    """Keep all that was there when the worker was forked out of its garbage collector, then let it collect."""
    gc.freeze()
    if collects:
        gc.enable()
    if worker_init_fn is not None:
        worker_init_fn(worker_id)


def ignore_in_worker(worker_init_fn: Callable[[int], None] | None, worker_id: int) -> None:
    """Start a dataloader's worker that leaves signals to its parent: launchers send them to the whole group."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    if worker_init_fn is not None:
        worker_init_fn(worker_id)
