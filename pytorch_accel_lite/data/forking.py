"""Forking processes that are sure to begin."""

from __future__ import annotations

import os
import signal
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.context import ForkContext, ForkProcess
from multiprocessing.popen_fork import Popen
from typing import Any

#: A forked process that has not begun after this many seconds is replaced; the next one gets twice as long.
SECONDS_TO_BEGIN = 2.0
_ATTEMPTS = 6


class CheckedPopen(Popen):
    """Forks a process, and makes sure that it begins.

    A thread of torch that is about to enter the interpreter holds a lock of it for an instant, without holding the
    global one. In a child that was forked just then, Python (3.11 at least) waits for that thread, which is not there.
    """

    def _launch(self, process_obj: CheckedProcess) -> None:
        for attempt in range(_ATTEMPTS):
            process_obj.pipe = Pipe(duplex=False)
            begun, child = process_obj.pipe
            with begun, child:
                super()._launch(process_obj)  # type: ignore[misc]
                if begun.poll(SECONDS_TO_BEGIN * 2**attempt):
                    return
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.finalizer()  # type: ignore[misc]
        raise RuntimeError(
            f"A worker of a DataLoader did not begin, tried {_ATTEMPTS} times. Is the machine overloaded?"
        )


class CheckedProcess(ForkProcess):
    """A process that says through a pipe that it has begun."""

    pipe: tuple[Connection, Connection]

    @staticmethod
    def _Popen(process_obj: Any) -> Popen:  # noqa: N802 (its name in multiprocessing)
        return CheckedPopen(process_obj)

    def _bootstrap(self, parent_sentinel: int | None = None) -> int:
        parent, begun = self.pipe
        with parent, begun:
            begun.send_bytes(b"1")
        code: int = super()._bootstrap(parent_sentinel)  # type: ignore[misc]
        return code


class CheckedForkContext(ForkContext):
    """Starts processes that are sure to begin."""

    Process = CheckedProcess
