"""Which metrics of a history are new since the last look."""

from __future__ import annotations

from typing import Any

from pytorch_accel_lite.engine.history import RunHistory, count_values


class NewMetrics:
    """The metrics that were recorded since they were last taken.

    :ivar counts: the number of values of each metric that were taken or skipped
    """

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def skip(self, history: RunHistory) -> None:
        """Take no notice of what has been recorded so far."""
        self.counts = count_values(history)

    def follow(self, history: RunHistory) -> None:
        """Forget values that are no longer in the history, which may have been reset."""
        existing = count_values(history)
        self.counts = {name: min(count, existing.get(name, 0)) for name, count in self.counts.items()}

    def take(self, history: RunHistory) -> dict[str, Any]:
        """Return the latest values of the metrics that are new, by name."""
        before = self.counts
        self.skip(history)
        names = [name for name, count in self.counts.items() if count > before.get(name, 0)]
        return {name: history.get_latest_metric(name) for name in names}
