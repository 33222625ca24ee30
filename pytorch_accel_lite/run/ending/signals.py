"""Ending a run in order at a signal."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from pytorch_accel_lite.base.display.shown_errors import add_note, notes_of
from pytorch_accel_lite.run.ending.stop_errors import RunInterruptedError

_HANDLED = signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT


@contextmanager
def ending_at_signals(request: Callable[[Exception], None]) -> Iterator[None]:
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
