"""Requests to stop or pause a run, coordinated over all processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, NoReturn

from pytorch_accel_lite.distributed.ranks import Ranks
from pytorch_accel_lite.run.ending.stop_errors import (
    NonFiniteLossError,
    RunInterruptedError,
    RunPausedError,
    StopTrainingError,
)

_SECONDS_BETWEEN_SYNCS = 0.2
_KINDS = RunInterruptedError, RunPausedError, NonFiniteLossError, StopTrainingError


class StopCoordinator:
    """Lets any rank request a stop or a pause, which all ranks then carry out at the same update.

    Each time the ranks synchronise, they agree on the number of updates until the next time, based on how long an
    update takes on the slowest rank. A single process need not synchronise.

    Evaluations and the ends of epochs always synchronise, and so does the update that comes next: a callback that all
    ranks stop because of what was evaluated, such as early stopping within an epoch, stops them as soon as one process.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        #: Whether ``sync()`` may have work to do: always on several ranks, otherwise once there is a request.
        self.must_sync = ranks.world_size > 1
        #: The signal that has requested the end of the run on this rank, also if the run has ended otherwise.
        self.interruption: RunInterruptedError | None = None
        self._requests: dict[str, tuple[int, Exception]] = {}
        self._calls = 0
        self._updates = 0
        self._interval = 1
        self.start_clock()

    def start_clock(self) -> None:
        """Start measuring the time of the run."""
        self._start = self._since = time.monotonic()
        self._clock = 0.0

    @property
    def clock(self) -> float:
        """Seconds since the start of the run, the same on every rank: with several, as of the last synchronisation."""
        return time.monotonic() - self._start if self.ranks.world_size == 1 else self._clock

    def request(self, error: Exception) -> None:
        """Request a stop or a pause with this error; the first of each is kept. Safe in a signal handler.

        A signal takes the place of another request to pause: the program ends, and its job may return to a queue.
        """
        kind = "pause" if isinstance(error, RunPausedError) else "stop"
        if isinstance(error, RunInterruptedError) and self.interruption is None:
            self.interruption = error
            self._requests.pop(kind, None)
        self._requests.setdefault(kind, (self._calls, error))
        self.must_sync = True

    def realign(self) -> None:
        """Synchronise at the next update: the ranks have changed. Call it on all ranks after the same update."""
        self.must_sync = self.must_sync or self.ranks.world_size > 1
        self._updates, self._interval = 0, 1

    def forget(self) -> None:
        """Discard all requests."""
        self._requests.clear()

    def sync(self, now: bool = False, can_save: bool = False) -> None:
        """Raise the error requested on any rank on all ranks. All ranks must call it at the same points.

        Args:
            now: synchronise even if it is not due, for example at the end of an epoch
            can_save: whether a run could resume exactly from this point; only then is a ``RunPausedError`` raised
        """
        self._calls += 1
        if not self.must_sync:
            return
        self._updates += 1
        stop, pause = (float(kind in self._requests) for kind in ("stop", "pause"))
        if self.ranks.world_size > 1:
            if not now and self._updates < self._interval:
                return
            current_time = time.monotonic()
            pace = (current_time - self._since) / self._updates
            stop, pause, pace, self._clock = self.ranks.max([stop, pause, pace, current_time - self._start])
            # With now, the time includes more than updates.
            self._interval = 1 if now else int(min(max(_SECONDS_BETWEEN_SYNCS / max(pace, 1e-9), 1), 10_000))
            self._updates = 0
            self._since = time.monotonic()
        if stop:
            self._raise_first("stop")
        if pause and can_save:
            self._raise_first("pause")

    def _raise_first(self, what: str) -> NoReturn:
        """Raise the error that was requested first. Other ranks recreate the error, because it may not be picklable."""
        request = self._requests.pop(what, None)  # a later run or evaluation must not see the request
        own = None if request is None else _Requested.describe(*request, self.ranks.rank)
        by_rank = self.ranks.all_gather_object(own)
        requests = [other for other in by_rank if other is not None]
        first = min(requests, key=lambda other: (other.kind is not RunInterruptedError, other.calls, other.rank))
        if request is not None and first.rank == self.ranks.rank:
            raise request[1]
        raise first.recreate()


class _Requested(NamedTuple):
    """A request to stop or to pause, as it is sent to the other ranks.

    Args:
        calls: number of calls of ``sync()`` before the request
        rank: the rank with the request
        kind: the class of the error
        argument: what an error of this class is created from
        raised_by: the callback that raised the error
    """

    calls: int
    rank: int
    kind: type[RunInterruptedError | RunPausedError | NonFiniteLossError | StopTrainingError]
    argument: int | str
    raised_by: str | None

    @classmethod
    def describe(cls, calls: int, error: Exception, rank: int) -> _Requested:
        """Return the description of an error, which may be of a subclass that only its rank knows."""
        kind = next(kind for kind in _KINDS if isinstance(error, kind))
        argument = error.signum if isinstance(error, RunInterruptedError) else str(error)
        return cls(calls, rank, kind, argument, getattr(error, "raised_by", None))

    def recreate(self) -> Exception:
        """Return an error of the same class."""
        create: Callable[[int | str], Exception] = self.kind
        error = create(self.argument)
        if isinstance(error, StopTrainingError):
            error.raised_by = self.raised_by
        return error
