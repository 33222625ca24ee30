"""Ending a run in order at a signal, and not outliving a launcher that was killed."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pytorch_accel_lite.events import RunInterruptedError

_PR_SET_PDEATHSIG = 1


@contextmanager
def ending_in_order(ask: Callable[[Exception], None], wanted: bool) -> Iterator[None]:
    """While the block runs, SIGTERM, SIGUSR1 and SIGINT ask for an end of the run; a second one ends at once.

    Nothing is changed in threads other than the main one, which receive no signals. Handlers are put back.

    :param ask: is given a :class:`RunInterruptedError`; only sets a flag
    """
    if not wanted or threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Any] = {}

    def handle(signum: int, frame: object) -> None:
        for number in before:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        ask(RunInterruptedError(signum))

    for number in (int(signal.SIGTERM), int(signal.SIGUSR1), int(signal.SIGINT)):
        before[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def exit_for(error: RunInterruptedError) -> None:
    """End the program as is usual after a signal: ``KeyboardInterrupt`` for Ctrl-C, else exit code 128 + number."""
    if error.signum == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + error.signum)


def ignore_in_worker(worker_init_fn: Callable[[int], None] | None, worker_id: int) -> None:
    """Start a dataloader's worker that leaves signals to its parent: launchers send them to the whole group."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    if worker_init_fn is not None:
        worker_init_fn(worker_id)


def die_with_launcher() -> None:
    """Under torchrun, let the system kill this process when its launcher is killed. Linux only."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died in between
        os.kill(os.getpid(), signal.SIGKILL)
