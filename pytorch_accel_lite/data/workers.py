"""Starting the workers of a dataloader, so that none of them waits for what only its parent has."""

from __future__ import annotations

import gc
import multiprocessing
import os
import select
import signal
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from multiprocessing.context import ForkContext, ForkProcess
from multiprocessing.popen_fork import Popen
from typing import Any, TypeVar

from torch.utils.data import DataLoader

T = TypeVar("T")

#: A forked process that has not begun after so many seconds is replaced; the next one gets twice as many.
SECONDS_TO_BEGIN = 2.0
_ATTEMPTS = 6


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
    batches.worker_init_fn = partial(_begin, worker_init_fn, was_enabled)
    if (start_method() if context is None else context.get_start_method()) == "fork":
        batches.multiprocessing_context = _CheckedForkContext()
    gc.disable()
    try:
        return iter(batches)
    finally:
        batches.worker_init_fn = worker_init_fn
        batches.multiprocessing_context = context
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


class _CheckedPopen(Popen):
    """Forks a process, and makes sure that it begins.

    A thread of torch that is about to enter the interpreter holds a lock of it for an instant, without holding the
    global one. Python up to 3.11 waits in a child that was forked just then for that thread, which the child has not.
    """

    def _launch(self, process_obj: _CheckedProcess) -> None:
        for attempt in range(_ATTEMPTS):
            process_obj.pipe = begun, _ = os.pipe()
            try:
                super()._launch(process_obj)  # type: ignore[misc]
                has_begun = bool(select.select([begun], [], [], SECONDS_TO_BEGIN * 2**attempt)[0])
            finally:
                process_obj.close_pipe()
            if has_begun:
                return
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.finalizer()  # type: ignore[misc]
        raise RuntimeError(
            f"A worker of a DataLoader did not begin, tried {_ATTEMPTS} times. Is the machine overloaded?"
        )


class _CheckedProcess(ForkProcess):
    pipe: tuple[int, int]  # through which the child says that it is there

    def close_pipe(self) -> None:
        for end in self.pipe:
            os.close(end)

    @staticmethod
    def _Popen(process_obj: Any) -> Popen:  # noqa: N802 (its name in multiprocessing)
        return _CheckedPopen(process_obj)

    def _bootstrap(self, parent_sentinel: int | None = None) -> int:
        os.write(self.pipe[1], b"1")
        self.close_pipe()
        code: int = super()._bootstrap(parent_sentinel)  # type: ignore[misc]
        return code


class _CheckedForkContext(ForkContext):
    Process = _CheckedProcess
