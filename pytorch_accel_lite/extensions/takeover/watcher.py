"""A thread in each process of a job that looks after its connections, and says how far the process has got."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from pytorch_accel_lite.extending import is_waiting
from pytorch_accel_lite.extensions.takeover.connections import any_is_connected, shut_down
from pytorch_accel_lite.extensions.takeover.job_store import Generation, JobStore

_PAUSE = 0.02  # seconds
_BEAT = 0.5


class Watcher(threading.Thread):
    """Ends the connections of a generation that has lost a member.

    Without it, a process would not notice if it waits for one that is silent, or that is not its neighbour.

    Attributes:
        is_wanted: whether a generation follows that has all members of this one, to be entered after an update
    """

    def __init__(self, number: int, host: str, port: int) -> None:
        super().__init__(name="pytorch_accel_lite.takeover", daemon=True)
        self.is_wanted = False
        self._number = number
        self._port = port
        self._store = JobStore.connect(host, port)
        self._generation: Generation | None = None
        self._is_connected = False
        self._follows: Generation | None = None  # the latest generation, if it is after that
        self._sockets: dict[int, str] = {}
        self._watched = threading.get_ident()
        self._is_over = threading.Event()
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
        pause = _PAUSE
        while not self._is_over.wait(pause):
            pause = _BEAT  # if the store cannot be reached
            with suppress(RuntimeError):
                self._look()
                if time.monotonic() > next_beat:
                    next_beat = time.monotonic() + _BEAT
                    self._say_how_far()
                pause = _PAUSE

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
        self._store.say(f"progress/{self._number}", json.dumps(progress))

    def stop(self) -> None:
        """End the thread, before the interpreter does."""
        self._is_over.set()
        if self.is_alive():
            self.join(10 * _BEAT)
