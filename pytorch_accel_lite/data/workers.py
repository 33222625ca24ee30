"""Starting the workers of a dataloader, so that none of them waits for what only its parent has."""

from __future__ import annotations

import gc
import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TypeVar

from torch.utils.data import DataLoader

T = TypeVar("T")


def start_method() -> str:
    """Return how processes are started by default."""
    # Asking without allow_none would fix it for the whole program.
    return multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]


def start_reading(batches: Iterable[T]) -> Iterator[T]:
    """Return ``iter(batches)``; the workers of a ``DataLoader`` are forked so that all of them begin.

    A forked worker inherits its parent's garbage: process groups, the iterators of earlier epochs, trainers. Were they
    collected there, their finalisers would wait for threads and processes that only the parent has, perhaps forever.
    """
    if not isinstance(batches, DataLoader) or not batches.num_workers:
        return iter(batches)
    was_enabled = gc.isenabled()
    worker_init_fn = batches.worker_init_fn
    context = batches.multiprocessing_context
    # While a run ends in order at signals, its workers must not die of them first.
    leaves_signals = signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    batches.worker_init_fn = partial(_begin, worker_init_fn, was_enabled, leaves_signals)
    if (start_method() if context is None else context.get_start_method()) == "fork":
        from pytorch_accel_lite.data.forking import CheckedForkContext  # which not every system has

        batches.multiprocessing_context = CheckedForkContext()
    gc.disable()
    try:
        return iter(batches)
    finally:
        batches.worker_init_fn = worker_init_fn
        batches.multiprocessing_context = context
        if was_enabled:
            gc.enable()


def _begin(
    worker_init_fn: Callable[[int], object] | None, collects: bool, leaves_signals: bool, worker_id: int
) -> None:
    """Start a worker: keep all that was there when it was forked out of its garbage collector, then let it collect.

    :param leaves_signals: leave signals to its parent: launchers send them to the whole group
    """
    gc.freeze()
    if collects:
        gc.enable()
    if leaves_signals:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
    if worker_init_fn is not None:
        worker_init_fn(worker_id)
