"""Ending a run in order at a signal, and the queues to which a job may then return."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

from pytorch_accel_lite.base.display.shown_errors import add_note, notes_of
from pytorch_accel_lite.run.ending.stop_errors import RunInterruptedError

_HANDLED = signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT


@contextmanager
def ending_at_signals(request: Callable[[RunInterruptedError], None]) -> Iterator[None]:
    """In a block, make SIGTERM, SIGUSR1, SIGUSR2 and SIGINT request the end of the run.

    Signals that the program ignores stay ignored, such as SIGINT in what a shell script has started with ``&``. If the
    same signal comes again, it ends the program immediately. Another signal does not, because schedulers may send
    several in a row. Does nothing in threads other than the main one, which receive no signals. Handlers are restored
    afterwards.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[signal.Signals, Callable[[int, FrameType | None], object] | int | None] = {}

    def handle(signum: int, frame: object) -> None:
        signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
        request(RunInterruptedError(signum))

    for number in _HANDLED:
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def exit_after_signal(interruption: Exception) -> None:
    """After a signal, exit in the usual way: ``KeyboardInterrupt`` for Ctrl-C, otherwise exit code 128 + number.

    A handler that the program had installed for this signal is called first: submitit's, for example, returns the job
    to the queue. The notes of the interruption become those of the exception.
    """
    if isinstance(interruption, RunInterruptedError):
        handler = signal.getsignal(interruption.signum)
        if callable(handler) and handler is not signal.default_int_handler:
            handler(interruption.signum, None)
        is_from_keyboard = interruption.signum == signal.SIGINT
        end = KeyboardInterrupt() if is_from_keyboard else SystemExit(128 + interruption.signum)
        for note in notes_of(interruption):
            add_note(end, note)
        raise end


class JobQueue(Protocol):
    """The queue of a cluster, for ``SaveTrainingStateCallback(requeue=True)``. Only the first process of a job uses it.

    Outside such a cluster, its methods do nothing.
    """

    def check(self) -> None:
        """Check before training that this job could return to the queue.

        Raises:
            RuntimeError: if the job could not return
        """

    def was_requeued(self) -> bool:
        """Whether this job has returned to the queue before."""

    def requeue_after(self, interruption: Exception) -> str:
        """Return this job to the queue if its run was interrupted in a way that requires that.

        Args:
            interruption: the error that has paused the run, for example a ``RunInterruptedError``

        Returns:
            a sentence to print that says what was done; empty if nothing was done
        """


#: The known queues, by the name of the cluster's scheduler. An extension adds its own.
JOB_QUEUES: dict[str, JobQueue] = {}
