"""Starting the workers of a dataloader so that no worker waits for threads that exist only in its parent."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.context import ForkContext, ForkProcess
from multiprocessing.popen_fork import Popen
from multiprocessing.queues import Queue
from typing import Any, TypeVar

from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, get_worker_info

from pytorch_accel_lite.base.machine import ENDING_SIGNALS
from pytorch_accel_lite.base.warnings_and_errors import add_note
from pytorch_accel_lite.data.reading import SampleReader

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
    # If a run ends in order at a signal, the signal must not kill its workers first.
    leaves_signals = signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    batches.worker_init_fn = partial(_initialise_worker, worker_init_fn, was_enabled, leaves_signals)
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


def _initialise_worker(
    worker_init_fn: Callable[[int], object] | None, collects: bool, leaves_signals: bool, worker_id: int
) -> None:
    """Initialise a worker: exclude all inherited objects from garbage collection, then enable it.

    Args:
        collects: whether to enable garbage collection
        leaves_signals: whether to ignore signals, which launchers send to the whole group, and leave them to the parent
    """
    gc.freeze()
    if collects:
        gc.enable()
    if leaves_signals:
        for number in ENDING_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
    info: Any = get_worker_info()
    if isinstance(info.dataset, SampleReader):  # show users their dataset; torch does not read it
        object.__setattr__(info, "dataset", info.dataset.dataset)  # the attribute is read-only
    if worker_init_fn is not None:
        worker_init_fn(worker_id)


#: Seconds after which a forked process that has not started is replaced; doubled for every attempt.
SECONDS_TO_BEGIN = 2.0
_ATTEMPTS = 6


class CheckedProcess(ForkProcess):
    """A process that reports through a pipe that it has started, and is replaced if it does not.

    A torch thread that is about to enter the interpreter briefly holds one of its locks without holding the GIL. In a
    child forked at that moment, Python (at least 3.11) waits for that thread, which does not exist in the child.
    """

    pipe: tuple[Connection, Connection]
    context: CheckedForkContext

    def start(self) -> None:
        """Fork the process."""
        self._call = self._target, self._args, self._kwargs  # type: ignore[has-type] # start() deletes them
        super().start()
        self.context.started(self)

    @staticmethod
    def _Popen(process_obj: Any) -> Popen:  # noqa: N802 (its name in multiprocessing)
        process_obj.pipe = Pipe(duplex=False)
        return Popen(process_obj)

    def ensure_started(self) -> None:
        """Wait until the process has started, forking it again if it takes too long."""
        for attempt in range(_ATTEMPTS):
            started, child = self.pipe
            with started, child:
                if started.poll(SECONDS_TO_BEGIN * 2**attempt):
                    del self._call
                    return
            assert self.pid is not None
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self._popen.finalizer()  # type: ignore[has-type]
            self._target, self._args, self._kwargs = self._call
            self._popen = self._Popen(self)
            self._sentinel = self._popen.sentinel
            del self._target, self._args, self._kwargs
        raise RuntimeError(f"A DataLoader worker did not start after {_ATTEMPTS} attempts. Is the machine overloaded?")

    def _bootstrap(self, parent_sentinel: int | None = None) -> int:
        parent, started = self.pipe
        with parent, started:
            started.send_bytes(b"1")
        code: int = super()._bootstrap(parent_sentinel)  # type: ignore[misc]
        return code


class BatchQueue(Queue):  # type: ignore[type-arg] # it takes no argument at runtime
    """A queue of batches of workers, on which a batch that cannot be sent is an error; torch would wait for it forever.

    A thread of the worker pickles the batches. A tensor that requires gradients, for example, cannot be.
    """

    def _on_queue_feeder_error(self, error: Exception, sent: tuple[int, object]) -> None:
        info = get_worker_info()
        if info is None:  # in the training process, which sends indices
            super()._on_queue_feeder_error(error, sent)  # type: ignore[misc]
            return
        add_note(
            error,
            "A worker cannot send this batch to the training process. Let the dataset and collate_fn return data that "
            "can be pickled, such as detached tensors, or read without workers: num_workers=0 in the arguments of the "
            "DataLoader.",
        )
        where = f"in DataLoader worker process {info.id}"
        raised = (type(error), error, error.__traceback__)
        self.put((sent[0], ExceptionWrapper(raised, where)))  # type: ignore[no-untyped-call]


class CheckedForkContext(ForkContext):
    """A multiprocessing context whose processes are guaranteed to start.

    Args:
        count: number of processes to start; starting the last one waits for all
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count
        self._waiting: list[CheckedProcess] = []

    def Queue(self, maxsize: int = 0) -> BatchQueue:  # noqa: N802
        """Return a queue between the process and its workers."""
        return BatchQueue(maxsize, ctx=self.get_context())

    def Process(self, *args: Any, **kwargs: Any) -> CheckedProcess:  # type: ignore[override] # noqa: N802
        """Return a process that is not started yet."""
        process = CheckedProcess(*args, **kwargs)
        process.context = self
        return process

    def started(self, process: CheckedProcess) -> None:
        """Note that a process has been forked."""
        self._waiting.append(process)
        if len(self._waiting) == self._count:
            while self._waiting:
                self._waiting.pop(0).ensure_started()
