"""A thread in each process of a job that looks after its connections, and says how far the process has got."""

from __future__ import annotations

import json
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from pytorch_accel_lite.extensions.hang_watch import is_waiting
from pytorch_accel_lite.extensions.takeover.connections import any_is_connected, shut_down
from pytorch_accel_lite.extensions.takeover.job_store import Generation, JobStore, Key

_SECONDS_BETWEEN_REPORTS = 0.5  # seconds


class Waker:
    """Lets a thread wait until it is woken, by another thread or another process.

    Args:
        ends: the descriptors of a pipe, from which one reads what the others write
    """

    def __init__(self, ends: Sequence[int]) -> None:
        self._own, self._others = ends
        self._poll = select.poll()
        self._poll.register(self._own, select.POLLIN)

    def wake(self) -> None:
        """Wake who waits, or will wait."""
        with suppress(BlockingIOError):  # others have, many times
            os.write(self._others, b"\0")

    def wait(self, seconds: float) -> None:
        """Wait until woken, for some time at most."""
        if self._poll.poll(1000 * seconds):
            os.read(self._own, 1 << 10)


class Watcher(threading.Thread):
    """Ends the connections of a generation that has lost a member.

    Without it, a process would not notice if it waits for one that is silent, or that is not its neighbour. It looks
    when it is woken, as it is when a generation begins, and twice a second.

    Args:
        number: the number of this process, the same in all generations
        waker: wakes the watcher

    Attributes:
        is_wanted: whether a generation follows that has all members of this one, to be entered after an update
    """

    def __init__(self, number: int, host: str, port: int, waker: Waker) -> None:
        super().__init__(name="pytorch_accel_lite.takeover", daemon=True)
        self.is_wanted = False
        self._waker = waker
        self._number = number
        self._port = port
        self._store = JobStore.connect(host, port)
        self._generation: Generation | None = None
        self._is_connected = False
        self._follows: Generation | None = None  # the latest generation, if it is after that
        self._sockets: dict[int, str] = {}
        self._watched = threading.get_ident()
        self._is_over = False
        self._lock = threading.Lock()
        self._beats = 0

    def begin(self, count: Callable[[], int]) -> None:
        """Start the thread.

        Args:
            count: returns a number that grows as the process gets further
        """
        self._count = count
        self.start()

    def watch(self, generation: Generation, sockets: dict[int, str]) -> None:
        """Watch the connections of a generation, which this process has entered."""
        with self._lock:
            self._generation, self._sockets = generation, sockets
            self._is_connected, self._follows, self.is_wanted = True, None, False
        self._waker.wake()  # another one may have begun meanwhile

    def is_cut_off(self) -> bool:
        """Whether another generation follows, and no connection of this one is left."""
        with self._lock:
            return self._is_connected and self._follows is not None and not any_is_connected(self._sockets)

    def end_connections(self) -> None:
        """End the connections that are watched."""
        with self._lock:
            self._is_connected = False
            sockets, self._sockets = self._sockets, {}
            shut_down(sockets, self._port)

    def run(self) -> None:
        """Look until the process ends."""
        next_beat = 0.0
        while not self._is_over:
            with suppress(RuntimeError):  # the store cannot be reached
                self._look()
                if time.monotonic() > next_beat:
                    next_beat = time.monotonic() + _SECONDS_BETWEEN_REPORTS
                    self._say_how_far()
            self._waker.wait(_SECONDS_BETWEEN_REPORTS)

    def _look(self) -> None:
        generation = self._generation
        assert generation is not None
        follows = self._store.after(generation)
        if follows is None:
            return
        with self._lock:
            if generation is self._generation:
                self._follows = follows
                self.is_wanted = set(generation.members) <= set(follows.members)
                if not self.is_wanted:
                    shut_down(self._sockets, self._port)

    def _say_how_far(self) -> None:
        self._beats += 1
        progress = [self._beats, self._count(), is_waiting(self._watched)]
        self._store.say(Key.PROGRESS, json.dumps(progress), self._number)

    def stop(self) -> None:
        """End the thread, before the interpreter does."""
        self._is_over = True
        self._waker.wake()
        if self.is_alive():
            self.join(10 * _SECONDS_BETWEEN_REPORTS)
