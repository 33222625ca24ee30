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

    def ensure_begun(self) -> None:
        """Wait until the process has started, forking it again if it takes too long."""
        for attempt in range(_ATTEMPTS):
            begun, child = self.pipe
            with begun, child:
                if begun.poll(SECONDS_TO_BEGIN * 2**attempt):
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
        parent, begun = self.pipe
        with parent, begun:
            begun.send_bytes(b"1")
        code: int = super()._bootstrap(parent_sentinel)  # type: ignore[misc]
        return code


class CheckedForkContext(ForkContext):
    """A multiprocessing context whose processes are guaranteed to start.

    :param count: number of processes that will be started, of which the last waits for all
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count
        self._waiting: list[CheckedProcess] = []

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
                self._waiting.pop(0).ensure_begun()
