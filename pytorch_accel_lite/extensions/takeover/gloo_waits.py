"""Ending the wait for a lost process, where gloo would block until its timeout.

When a connection closes, gloo fails the messages that have not started, but never completes one that is partly
transferred. With models of some megabytes, many losses happen during such a transfer.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from pytorch_accel_lite.extension_tools.processes import MACHINERY

MACHINERY.add(__file__)
_LOOK = timedelta(seconds=0.05)
_SECONDS_TO_FAIL = 0.05  # for gloo's threads to fail what they can once the connections are closed


class LostConnectionError(RuntimeError):
    """The connections of a collective are closed, but the collective is still pending."""


def watch_waits(is_cut_off: Callable[[], bool]) -> None:
    """Make every wait for a collective raise an error once the connections of the process group are closed.

    Args:
        is_cut_off: whether all connections of the process group are closed
    """
    work: Any = dist.Work
    wait = work.wait

    def wait_or_fail(self: Any, timeout: timedelta = timedelta(0)) -> bool:
        if timeout:
            return bool(wait(self, timeout))
        look = _look_at_transfer(self, wait) if _is_transfer(self) else _look_at_collective(self, wait)
        while not look():
            if is_cut_off():
                time.sleep(_SECONDS_TO_FAIL)
                if not look():
                    raise LostConnectionError("Connection closed by peer: gloo waits for a process that is lost.")
        return True

    work.wait = wait_or_fail


def _look_at_collective(work: Any, wait: Callable[..., object]) -> Callable[[], bool]:
    def look() -> bool:
        try:
            wait(work, _LOOK)
        except RuntimeError:
            if not work.is_completed():
                return False
            wait(work)  # raises its error, if it has one
        return True

    return look


def _look_at_transfer(work: Any, wait: Callable[..., object]) -> Callable[[], bool]:
    """Poll a point-to-point transfer from a thread, as gloo aborts a transfer whose wait times out."""

    def wait_for_it() -> None:
        try:
            wait(work)
        except RuntimeError as error:
            errors.append(error)

    errors: list[RuntimeError] = []
    thread = threading.Thread(target=wait_for_it, daemon=True)
    thread.start()

    def look() -> bool:
        thread.join(_LOOK.total_seconds())
        if errors:
            raise errors[0]
        return not thread.is_alive()

    return look


def _is_transfer(work: Any) -> bool:
    try:
        work.get_future()
    except RuntimeError:  # has none
        return True
    return False


def never_delete(group: dist.ProcessGroup) -> None:
    """Leak a process group. Its destructor would join its threads, of which one may wait for a lost process forever.

    That may be a thread with another message than the one whose error was raised.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
