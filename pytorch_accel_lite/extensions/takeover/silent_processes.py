"""How far the processes of a job have got, and which of them does nothing although others wait for it."""

from __future__ import annotations

import json
from collections.abc import Mapping

_BUSY = 0.05  # the share of the time in which a process computes that does something, also on a busy machine


class SignsOfLife:
    """How far a process has got, as it says itself, and what it computes, as the system says.

    Attributes:
        computed: the CPU time of the process, in seconds
    """

    def __init__(self, now: float) -> None:
        self.computed = 0.0
        self._said = ""
        self._place: list[object] = []
        self._said_at = now
        self._begin(now)

    def _begin(self, now: float) -> None:
        self._since, self._computed = now, self.computed

    def note(self, said: str | None, now: float) -> None:
        """Note what the process says: a number that always grows, one that grows as it gets further, whether it waits.

        Args:
            said: the latest of that
        """
        if said is None or said == self._said:
            return
        self._said, self._said_at = said, now
        _, *place = json.loads(said)
        if place != self._place:
            self._place = place
            self._begin(now)

    def waits(self, now: float, seconds: float) -> bool:
        """Whether it has waited for others for some time."""
        is_alive = now - self._said_at < seconds
        return is_alive and bool(self._place) and bool(self._place[-1]) and now - self._since >= seconds

    def is_silent(self, now: float, seconds: float) -> bool:
        """Whether it has neither got further nor computed for some time, nor waited for others."""
        still = now - self._since
        computes = self.computed - self._computed > _BUSY * still
        return still >= seconds and not computes and not self.waits(now, seconds)


def find_silent(progress: Mapping[int, SignsOfLife], now: float, seconds: float, are_all_there: bool) -> list[int]:
    """Return the processes that are silent while others wait for them.

    Args:
        progress: by the number of each process
        are_all_there: whether all have entered the latest generation; until then, each waits for those that have not
    """
    if are_all_there and not any(each.waits(now, seconds) for each in progress.values()):
        return []
    return [number for number, each in progress.items() if each.is_silent(now, seconds)]
