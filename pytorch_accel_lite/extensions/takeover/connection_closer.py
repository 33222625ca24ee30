"""A thread in each process of a job that closes connections after a loss, and reports the progress of the process."""

from __future__ import annotations

import json
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from pytorch_accel_lite.extensions.hang_watch import is_waiting
from pytorch_accel_lite.extensions.takeover.group_sockets import any_is_connected, shut_down
from pytorch_accel_lite.extensions.takeover.job_store import Generation, JobStore, Key

_SECONDS_BETWEEN_REPORTS = 0.5


class Waker:
    """Lets a thread sleep until another thread or process wakes it.

    Args:
        ends: the read and write descriptors of a pipe
    """

    def __init__(self, ends: Sequence[int]) -> None:
        self._own, self._others = ends
        self._poll = select.poll()
        self._poll.register(self._own, select.POLLIN)

    def wake(self) -> None:
        """Wake the thread, or make its next wait return at once."""
        with suppress(BlockingIOError):  # the pipe is full of wake-ups
            os.write(self._others, b"\0")

    def wait(self, seconds: float) -> None:
        """Wait until woken, for some time at most."""
        if self._poll.poll(1000 * seconds):
            os.read(self._own, 1 << 10)


class ConnectionCloser(threading.Thread):
    """Closes the connections of a generation that has lost a member.

    Without it, a process that waits for a hung process, or for one it is not connected to, would not notice the loss.
    It checks for a new generation when it is woken, as when one begins, and twice a second.

    Args:
        number: the number of this process, the same in all generations
        waker: wakes the thread

    Attributes:
        must_regroup: whether there is a new generation with all members of this one, to be entered after an update
    """

    def __init__(self, number: int, host: str, port: int, waker: Waker) -> None:
        super().__init__(name="pytorch_accel_lite.takeover", daemon=True)
        self.must_regroup = False
        self._waker = waker
        self._number = number
        self._port = port
        self._store = JobStore.connect(host, port)
        self._generation: Generation | None = None
        self._is_connected = False
        self._follows: Generation | None = None  # the latest generation, if newer
        self._sockets: dict[int, str] = {}
        self._watched = threading.get_ident()
        self._is_over = False
        self._lock = threading.Lock()
        self._beats = 0

    def begin(self, count: Callable[[], int]) -> None:
        """Start the thread.

        Args:
            count: returns a number that grows with the progress of the process
        """
        self._count = count
        self.start()

    def watch(self, generation: Generation, sockets: dict[int, str]) -> None:
        """Watch the connections of the generation that this process has entered."""
        with self._lock:
            self._generation, self._sockets = generation, sockets
            self._is_connected, self._follows, self.must_regroup = True, None, False
        self._waker.wake()  # a newer one may have begun meanwhile

    def is_cut_off(self) -> bool:
        """Whether there is a newer generation, and all connections of this one are closed."""
        with self._lock:
            return self._is_connected and self._follows is not None and not any_is_connected(self._sockets)

    def end_connections(self) -> None:
        """Close the connections that are watched."""
        with self._lock:
            self._is_connected = False
            sockets, self._sockets = self._sockets, {}
            shut_down(sockets, self._port)

    def run(self) -> None:
        """Check for new generations until the process ends."""
        next_beat = 0.0
        while not self._is_over:
            with suppress(RuntimeError):  # the store cannot be reached
                self._check()
                if time.monotonic() > next_beat:
                    next_beat = time.monotonic() + _SECONDS_BETWEEN_REPORTS
                    self._report_progress()
            self._waker.wait(_SECONDS_BETWEEN_REPORTS)

    def _check(self) -> None:
        generation = self._generation
        assert generation is not None
        follows = self._store.after(generation)
        if follows is None:
            return
        with self._lock:
            if generation is self._generation:
                self._follows = follows
                self.must_regroup = set(generation.members) <= set(follows.members)
                if not self.must_regroup:
                    shut_down(self._sockets, self._port)

    def _report_progress(self) -> None:
        self._beats += 1
        progress = [self._beats, self._count(), is_waiting(self._watched)]
        self._store.put(Key.PROGRESS, json.dumps(progress), self._number)

    def stop(self) -> None:
        """End the thread before the interpreter shuts down."""
        self._is_over = True
        self._waker.wake()
        if self.is_alive():
            self.join(10 * _SECONDS_BETWEEN_REPORTS)
