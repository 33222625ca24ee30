"""How a process stops waiting for one that is lost, where gloo would let it wait for its time limit.

When a connection ends, gloo fails the messages that it has yet to begin, but forgets the one of which a part is under
way. With models of some megabytes, many processes die within such a message.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from pytorch_accel_lite.extending import MACHINERY

MACHINERY.add(__file__)
_LOOK = timedelta(seconds=0.05)
_SECONDS_TO_FAIL = 0.05  # in which gloo's threads end what they can once the connections have ended


class LostConnectionError(RuntimeError):
    """The connections of a collective have ended, but not the collective itself."""


def watch_waits(is_cut_off: Callable[[], bool], note_stuck: Callable[[], None]) -> None:
    """Let all waits for collectives end, with an error, once the connections of the process group have ended.

    Args:
        is_cut_off: whether all connections of the process group have ended
        note_stuck: called if a thread of the process group goes on waiting
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
                    note_stuck()
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
    """Look at what is sent between two processes, which gloo would end if the wait for it had a time limit."""

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


def keep_for_ever(group: dist.ProcessGroup | None) -> None:
    """Never delete a process group: that would wait for its threads, of which one waits for a lost process."""
    if group is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
