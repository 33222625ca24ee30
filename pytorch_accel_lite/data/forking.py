"""Forking processes that are guaranteed to start."""

from __future__ import annotations

import os
import signal
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.context import ForkContext, ForkProcess
from multiprocessing.popen_fork import Popen
from typing import Any

#: Seconds after which a forked process that has not started is replaced; doubled for every attempt.
SECONDS_TO_BEGIN = 2.0
_ATTEMPTS = 6


class CheckedPopen(Popen):
    """Forks a process and makes sure that it starts.

    A torch thread that is about to enter the interpreter briefly holds one of its locks without holding the GIL. In a
    child forked at that moment, Python (at least 3.11) waits for that thread, which does not exist in the child.
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
        raise RuntimeError(f"A DataLoader worker did not start after {_ATTEMPTS} attempts. Is the machine overloaded?")


class CheckedProcess(ForkProcess):
    """A process that reports through a pipe that it has started."""

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
    """A multiprocessing context whose processes are guaranteed to start."""

    Process = CheckedProcess
