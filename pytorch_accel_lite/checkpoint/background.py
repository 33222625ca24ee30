"""Writing while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable

from accelerate import Accelerator

from pytorch_accel_lite.distributed import Ranks


class BackgroundWriter:
    """Writes in a thread of its own. Making one is a collective: all ranks do it.

    :ivar ranks: for the thread alone: it talks through a group of its own, beside the training's
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.ranks = Ranks(accelerator)
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    def start(self, job: Callable[[], None]) -> None:
        """Begin something, once what was begun before is complete.

        :raises Exception: what that failed with
        """
        self.wait()
        # A daemon: a process that fails does not wait for peers that do not come.
        self._thread = threading.Thread(target=self._run, args=(job,), daemon=True, name="training-state-writer")
        self._thread.start()

    def _run(self, job: Callable[[], None]) -> None:
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
