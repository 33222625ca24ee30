"""Goodput: how the time of a job, including its restarts, is spent."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol


class TimedLoader(Protocol):
    """A loader that measures how long training waits for it."""

    seconds_waited: float


_KINDS = ("training", "data", "evaluation", "saving", "starting", "takeover", "lost", "down")
_TAKEOVERS = "takeovers"  # key of their number in states


def describe_fractions(fractions: Mapping[str, float], takeovers: float = 0) -> str:
    """Return the fractions of a ``Goodput`` in words, the largest first, and the number of takeovers."""
    shares = sorted(fractions.items(), key=lambda item: -item[1])
    count = f" ({takeovers:.0f} takeover{'s' * (takeovers > 1)})" if takeovers else ""
    return ", ".join(f"{kind} {share:.1%}" for kind, share in shares if share >= 0.0005) + count


class Goodput:
    """How the time since the first start of a job has been spent. Saved in training states, so it covers restarts.

    ``training`` is the time that remains when all other kinds are subtracted: waiting for ``data``; ``evaluation``;
    ``saving``, as far as training waits for it; ``starting``, until the first step; ``takeover`` of the work of lost
    processes, including repeated work; ``lost`` training that has to be repeated after an interruption; and the time
    during which the job was ``down``.

    Attributes:
        used: other resources that the job has used, such as energy, by a name with its unit
        takeovers: how often the job has continued without lost processes, or with new ones
    """

    def __init__(self) -> None:
        self.used: dict[str, float] = {}
        self.takeovers = 0
        self._earlier: dict[str, float] = {}  # seconds of earlier attempts
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._nested = 0.0  # seconds counted within the current block
        self._begin = time.monotonic()
        self._end: float | None = self._begin
        self._is_starting = True
        self._loader: TimedLoader | None = None  # the loader being read, during the steps of an epoch

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds by kind of time."""
        seconds = dict(self._seconds)
        if self._loader is not None:
            seconds["data"] = seconds.get("data", 0.0) + self._loader.seconds_waited
        elapsed = (time.monotonic() if self._end is None else self._end) - self._begin
        seconds["starting" if self._is_starting else "training"] = max(elapsed - sum(seconds.values()), 0.0)
        return {kind: seconds.get(kind, 0.0) + self._earlier.get(kind, 0.0) for kind in _KINDS}

    @property
    def fractions(self) -> dict[str, float]:
        """The fraction of each kind in the total time; the fractions add up to 1."""
        seconds = self.seconds
        total = sum(seconds.values()) or 1.0
        return {kind: value / total for kind, value in seconds.items()}

    @property
    def is_resumed(self) -> bool:
        """Whether there was an earlier attempt."""
        return bool(self._earlier)

    def __str__(self) -> str:
        return describe_fractions(self.fractions, self.takeovers)

    def __repr__(self) -> str:
        return f"Goodput({self})"

    def to_dict(self) -> dict[str, dict[str, float]]:
        """Return the seconds and fractions of each kind, the resources used, and the number of takeovers, if any."""
        others = {"used": self.used} if self.used else {}
        others |= {"counts": {_TAKEOVERS: float(self.takeovers)}} if self.takeovers else {}
        return {"seconds": self.seconds, "fractions": self.fractions, **others}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the time of a block as that of the run."""
        self._begin, self._end = time.monotonic(), None
        try:
            yield
        finally:
            self._end = time.monotonic()

    @contextmanager
    def counting(self, kind: str) -> Iterator[None]:
        """Count the time of a block, without the times that are counted within it, unless the run is over."""
        begin, outer, self._nested = time.monotonic(), self._nested, 0.0
        try:
            yield
        finally:
            elapsed = time.monotonic() - begin
            if self._end is None:
                self._seconds[kind] += elapsed - self._nested
            self._nested = outer + elapsed

    def note_takeover(self, seconds: float) -> None:
        """Count a change of the processes.

        Args:
            seconds: seconds since the beginning of the work that is repeated
        """
        self.takeovers += 1
        if self._end is None:
            self._seconds["takeover"] += seconds
            self._nested += seconds

    @contextmanager
    def training(self, loader: TimedLoader) -> Iterator[None]:
        """Count the steps of an epoch; everything before the first epoch counts as starting.

        Args:
            loader: the loader, whose ``seconds_waited`` measures how long training waits for it
        """
        if self._is_starting:
            self._seconds["starting"] = max(time.monotonic() - self._begin - sum(self._seconds.values()), 0.0)
            self._is_starting = False
        loader.seconds_waited = 0.0
        self._loader = loader
        try:
            yield
        finally:
            self._seconds["data"] += loader.seconds_waited
            self._loader = None

    def state_dict(self) -> dict[str, float]:
        """Return the seconds of each kind, and the number of takeovers."""
        return self.seconds | {_TAKEOVERS: float(self.takeovers)}

    def resume(self, state: Mapping[str, float], saved_at: float) -> None:
        """Continue from a state; the time since the state was saved counts as down."""
        down = max(time.time() - saved_at - (time.monotonic() - self._begin), 0.0)
        self.takeovers += int(state.get(_TAKEOVERS, 0))
        self._earlier = dict(state) | {"down": state.get("down", 0.0) + down}

    def note_sign_of_life(self, saved_at: float, alive_at: float) -> None:
        """Count the time between the state and the job's last sign of life as lost rather than down."""
        lost = min(max(alive_at - saved_at, 0.0), self._earlier["down"])
        self._earlier["lost"] = self._earlier.get("lost", 0.0) + lost
        self._earlier["down"] -= lost
