"""Requests to stop a run, on which all processes agree."""

from __future__ import annotations

import time

from pytorch_accel_lite.distributed.ranks import Ranks
from pytorch_accel_lite.events import NonFiniteLossError, RunInterruptedError, RunPausedError, StopTrainingError


class StopCoordinator:
    """Lets any rank ask for an end, and makes all ranks learn of it at the same update.

    Ranks synchronise at most every ``seconds``: each time they agree on the number of updates until the next, from
    the slowest rank's time for an update. With one process nothing is needed: errors are raised where they occur.
    """

    def __init__(self, ranks: Ranks, seconds: float = 0.2) -> None:
        self._ranks = ranks
        self._seconds = seconds
        self._request: tuple[int, Exception] | None = None
        self._pause: RunPausedError | None = None
        self._calls = 0
        self._updates = 0
        self._interval = 1
        self.start_clock()

    def start_clock(self) -> None:
        """Begin to measure the time of the run."""
        self._start = self._since = time.monotonic()
        self._clock = 0.0

    @property
    def clock(self) -> float:
        """Seconds since the start of the run, the same on every rank: as of when they last synchronised."""
        return time.monotonic() - self._start if self._ranks.world_size == 1 else self._clock

    def request(self, error: Exception) -> None:
        """Ask for an end with this error; the first one asked for is kept. Safe to call in a signal handler."""
        if isinstance(error, RunPausedError):
            self._pause = self._pause or error
        else:
            self._request = self._request or (self._calls, error)

    def forget(self) -> None:
        """Forget what was asked for."""
        self._request = self._pause = None

    def sync(self, now: bool = False, can_save: bool = False) -> None:
        """Raise the error that any rank has asked for, on all ranks. To be called by all at the same points.

        :param now: synchronise in any case, as at the end of an epoch
        :param can_save: the run could go on from here exactly; only then is a :class:`RunPausedError` raised
        """
        self._calls += 1
        if self._ranks.world_size == 1 and self._request is None and self._pause is None:
            return
        self._updates += 1
        paused = 0.0 if self._pause is None else float(getattr(self._pause, "signum", 0.5))
        asked = float(self._request is not None)
        if self._ranks.world_size > 1:
            if not now and self._updates < self._interval:
                return
            time_now = time.monotonic()
            pace = (time_now - self._since) / self._updates
            asked, paused, pace, self._clock = self._ranks.max([asked, paused, pace, time_now - self._start])
            self._interval = int(min(max(self._seconds / max(pace, 1e-9), 1), 10_000))
            self._updates = 0
            self._since = time.monotonic()
        if asked:
            self._raise_first()
        if paused and can_save:
            message = None if self._pause is None else str(self._pause)
            self._pause = None
            if paused >= 1:
                raise RunInterruptedError(int(paused))
            raise RunPausedError(next(filter(None, self._ranks.all_gather_object(message))))

    def _raise_first(self) -> None:
        """Raise the error that was asked for first. On other ranks it is made again: errors may not be picklable."""
        mine = None
        request = self._request
        self._request = None  # it is answered: a later run or evaluation starts without it
        if request is not None:
            calls, error = request
            mine = calls, self._ranks.rank, isinstance(error, NonFiniteLossError), str(error)
        _, rank, is_loss, message = min(filter(None, self._ranks.all_gather_object(mine)))
        if request is not None and rank == self._ranks.rank:
            raise request[1]
        raise NonFiniteLossError(message) if is_loss else StopTrainingError(message)
