"""The progress of the processes of a job, and which of them are stuck while others wait for them."""

from __future__ import annotations

import json
from collections.abc import Mapping

_BUSY = 0.05  # the least CPU share of a process that is working, also on a busy machine


class Liveness:
    """Progress as reported by the process, and CPU time as reported by the kernel.

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
        """Record the latest report of the process.

        Args:
            said: in JSON, a count of reports, a count that grows with the progress, and whether the process waits
        """
        if said is None or said == self._said:
            return
        self._said, self._said_at = said, now
        _, *place = json.loads(said)
        if place != self._place:
            self._place = place
            self._begin(now)

    def waits(self, now: float, seconds: float) -> bool:
        """Whether the process has been waiting for others for this long."""
        is_alive = now - self._said_at < seconds
        return is_alive and bool(self._place) and bool(self._place[-1]) and now - self._since >= seconds

    def is_stuck(self, now: float, seconds: float) -> bool:
        """Whether the process has made no progress, used no CPU time and not waited for others for this long."""
        still = now - self._since
        computes = self.computed - self._computed > _BUSY * still
        return still >= seconds and not computes and not self.waits(now, seconds)


def find_stuck(progress: Mapping[int, Liveness], now: float, seconds: float, are_all_there: bool) -> list[int]:
    """Return the processes that are stuck while others wait for them.

    Args:
        progress: the liveness of each process, by its number
        are_all_there: whether all have entered the latest generation; until then, the others are waited for
    """
    if are_all_there and not any(each.waits(now, seconds) for each in progress.values()):
        return []
    return [number for number, each in progress.items() if each.is_stuck(now, seconds)]
