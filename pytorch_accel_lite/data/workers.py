"""Starting the workers of a dataloader such that none waits for threads that exist only in its parent."""

from __future__ import annotations

import gc
import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar

from torch.utils.data import DataLoader, get_worker_info

from pytorch_accel_lite.data.forking import CheckedForkContext
from pytorch_accel_lite.data.seeded_reading import BatchReader

T = TypeVar("T")


def start_method() -> str:
    """Return the default start method of processes."""
    # Without allow_none, asking would fix the method for the rest of the program.
    return multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]


def start_reading(batches: Iterable[T]) -> Iterator[T]:
    """Return ``iter(batches)``, forking the workers of a ``DataLoader`` such that all of them start.

    A forked worker inherits its parent's garbage: process groups, iterators of earlier epochs, trainers. If the worker
    collected it, finalisers would wait, perhaps forever, for threads and processes that exist only in the parent.
    """
    if not isinstance(batches, DataLoader) or not batches.num_workers:
        return iter(batches)
    was_enabled = gc.isenabled()
    worker_init_fn = batches.worker_init_fn
    context = batches.multiprocessing_context
    # While a run handles signals by ending in order, they must not kill its workers first.
    leaves_signals = signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    batches.worker_init_fn = partial(_begin, worker_init_fn, was_enabled, leaves_signals)
    if (start_method() if context is None else context.get_start_method()) == "fork":
        batches.multiprocessing_context = CheckedForkContext(batches.num_workers)
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
    """Initialise a worker: exclude all inherited objects from garbage collection, then enable it.

    :param collects: whether to enable garbage collection
    :param leaves_signals: whether to leave signals, which launchers send to the whole group, to the parent
    """
    gc.freeze()
    if collects:
        gc.enable()
    if leaves_signals:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
    _show_users_dataset()
    if worker_init_fn is not None:
        worker_init_fn(worker_id)


def _show_users_dataset() -> None:
    """Let ``get_worker_info().dataset`` be the user's dataset, which is inside another that seeds each sample."""
    info: Any = get_worker_info()
    if isinstance(info.dataset, BatchReader):
        # The information is read-only, and what torch reads from has been passed to it apart.
        object.__setattr__(info, "dataset", info.dataset.dataset)
