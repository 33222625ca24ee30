"""How a run ends: stops that all processes agree on, signals, errors, and what is done last."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import NamedTuple, NoReturn, Protocol

from pytorch_accel_lite.base.machine import ENDING_SIGNALS
from pytorch_accel_lite.base.warnings_and_errors import add_note, notes_of
from pytorch_accel_lite.distributed.ranks import Ranks


class StopTrainingError(Exception):
    """Raise it in a callback to end the run early but in order: the ending events fire, and ``train`` returns.

    With one process, the run stops where it is raised. With several, a single rank may raise it: the request is passed
    to the others, and all ranks stop after the same update. With logical processes, that is the current update, on any
    number of ranks. A stopped run is over, also for ``train(resume_from="latest")``, unless you give it more epochs or
    updates, or change the arguments of the callback. To continue a run later, raise ``RunPausedError``.
    """

    #: The callback that raised it, as the call that created it.
    raised_by: str | None = None


class RunPausedError(StopTrainingError):
    """Raise it in a callback to pause training: the run ends after the current update, and can be resumed later.

    Use it for time limits of your own, for example.
    """


class RunInterruptedError(RunPausedError):
    """Raised if the signal with number ``signum`` has requested the end of the run."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"Stopping because of {signal.Signals(signum).name}.")
        self.signum = signum


class NonFiniteLossError(FloatingPointError):
    """A loss became infinite or NaN. Raised from ``train`` on every rank, after the ending events."""


@dataclass(slots=True, eq=False, repr=False)
class RunEnd:
    """How a run ends.

    Attributes:
        reason: why the run was stopped early
        stopped_by: the callback that stopped the run, as the call that created the callback
        pause: the request to pause that stopped the run
        has_reached_limit: whether the last epoch made the last requested update
        custom_loop_is_ending: whether the custom loop of an overridden ``_run_training`` has begun the ending events
        has_failed: whether an error has ended the run
        last_calls: functions to call when the run has ended without an error and all callbacks have handled its end
    """

    reason: str | None = None
    stopped_by: str | None = None
    pause: RunPausedError | None = None
    has_reached_limit: bool = False
    custom_loop_is_ending: bool = False
    has_failed: bool = False
    last_calls: list[Callable[[], None]] = field(default_factory=list)

    def note(self, stop: StopTrainingError) -> None:
        """Note the request that stops the run early."""
        self.reason, self.stopped_by = str(stop) or type(stop).__name__, stop.raised_by
        self.pause = stop if isinstance(stop, RunPausedError) else None

    def make_last_calls(self) -> None:
        """Make the last calls, in the order in which they were requested."""
        for call in self.last_calls:
            call()

    @property
    def is_regular(self) -> bool:
        """Whether the run ended, possibly early, without failing or being paused."""
        return self.pause is None and not self.has_failed


_SECONDS_BETWEEN_SYNCS = 0.2
_KINDS = RunInterruptedError, RunPausedError, NonFiniteLossError, StopTrainingError


class StopCoordinator:
    """Lets any rank request a stop or a pause, which all ranks then carry out at the same update.

    Each time the ranks synchronise, they agree on the number of updates until the next time, based on how long an
    update takes on the slowest rank. A single process need not synchronise.

    Evaluations and the ends of epochs always synchronise, and so does the update that comes next: a callback that all
    ranks stop because of what was evaluated, such as early stopping within an epoch, stops them as soon as one process.

    Attributes:
        syncs_each_update: whether the ranks, be they one or several, synchronise at each update, and a stop waits for
            it: the run then stops at the same point on any number of ranks
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.syncs_each_update = False
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
            self._interval = int(min(max(_SECONDS_BETWEEN_SYNCS / max(pace, 1e-9), 1), 10_000))
            if now or self.syncs_each_update:  # with now, the time includes more than updates
                self._interval = 1
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
    kind: type[Exception]
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
        error = self.kind(self.argument)
        if isinstance(error, StopTrainingError):
            error.raised_by = self.raised_by
        return error


@contextmanager
def ending_at_signals(request: Callable[[RunInterruptedError], None]) -> Iterator[None]:
    """In a block, make SIGTERM, SIGUSR1, SIGUSR2 and SIGINT request the end of the run.

    Signals that the program ignores stay ignored, such as SIGINT in what a shell script has started with ``&``. If the
    same signal comes again, it ends the program immediately. Another signal does not, because schedulers may send
    several in a row. Does nothing in threads other than the main one, which receive no signals. Handlers are restored
    afterwards.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[signal.Signals, Callable[[int, FrameType | None], object] | int | None] = {}

    def handle(signum: int, frame: object) -> None:
        signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
        request(RunInterruptedError(signum))

    for number in ENDING_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def exit_after_signal(interruption: RunInterruptedError | None) -> None:
    """After a signal, exit in the usual way: ``KeyboardInterrupt`` for Ctrl-C, otherwise exit code 128 + number.

    A handler that the program had installed for this signal is called first: submitit's, for example, returns the job
    to the queue. The notes of the interruption become those of the exception.
    """
    if interruption is None:
        return
    number = interruption.signum
    handler = signal.getsignal(number)
    if callable(handler) and handler is not signal.default_int_handler:
        handler(number, None)
    end = KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)
    for note in notes_of(interruption):
        add_note(end, note)
    raise end


class JobQueue(Protocol):
    """The queue of a cluster, for ``SaveTrainingStateCallback(requeue=True)``. Only the first process of a job uses it.

    Outside such a cluster, its methods do nothing.
    """

    def check(self) -> None:
        """Check before training that this job could return to the queue.

        Raises:
            RuntimeError: if the job could not return
        """

    def was_requeued(self) -> bool:
        """Whether this job has returned to the queue before."""

    def requeue_after(self, interruption: Exception) -> str:
        """Return this job to the queue if its run was interrupted in a way that requires that.

        Args:
            interruption: the error that has paused the run, for example a ``RunInterruptedError``

        Returns:
            a sentence to print that says what was done; empty if nothing was done
        """


#: The known queues, by the name of the cluster's scheduler. An extension adds its own.
JOB_QUEUES: dict[str, JobQueue] = {}
