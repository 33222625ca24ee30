"""Writing while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import ClassVar

from accelerate import Accelerator

from pytorch_accel_lite.distributed import Ranks


class BackgroundWriter:
    """Writes in a thread of its own. Making one is a collective: all ranks do it.

    The writers of a process write one after another, in the order in which they were started: it is the same on all
    ranks, so that they can share one group for what they communicate.

    :ivar ranks: for the thread alone, beside the training's
    """

    _newest: ClassVar[threading.Thread | None] = None  # of all writers

    def __init__(self, accelerator: Accelerator) -> None:
        self.ranks = Ranks(accelerator, "background writing")
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    def start(self, job: Callable[[], None]) -> None:
        """Begin something, once what was begun before is complete.

        :raises Exception: what that failed with
        """
        self.wait()
        # A daemon: a process that fails does not wait for peers that do not come.
        before = BackgroundWriter._newest
        self._thread = threading.Thread(target=self._run, args=(job, before), daemon=True, name="training-state-writer")
        BackgroundWriter._newest = self._thread
        self._thread.start()

    def _run(self, job: Callable[[], None], before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
        try:
            job()
        except Exception as error:
            self._failure = error

    def wait(self) -> None:
        """Wait for what was begun.

        :raises Exception: what it failed with
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
