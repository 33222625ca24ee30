"""Running losses whose sums over logical processes have a fixed order."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

from pytorch_accel_lite.engine.losses import LossTrackers


class SharedLossTrackers(LossTrackers):
    """Running losses of this process, as shown while they run, and of each of its logical processes.

    The means over all processes are made from the latter, added up in the order of the logical processes.
    """

    def __init__(self, numbers: Iterable[int], current: Callable[[], int]) -> None:
        super().__init__()
        self._current = current
        self.by_number = {number: LossTrackers() for number in numbers}

    def add(self, output: dict[str, Any]) -> None:
        """Add the losses of a share."""
        super().add(output)
        self.by_number[self._current()].add(output)

    def log(self, name: str, value: Any, weight: Any) -> None:
        """Add a value of a share under its own name."""
        super().log(name, value, weight)
        self.by_number[self._current()].log(name, value, weight)

    def capture_logged(self) -> list[dict[str, Any]]:
        """Return copies of the sums of logged values, which a failing step may have changed."""
        return copy.deepcopy([self.state_dict(), *(trackers.state_dict() for trackers in self.by_number.values())])

    def restore_logged(self, captured: list[dict[str, Any]]) -> None:
        """Restore what :meth:`capture_logged` returned, discarding values logged since."""
        for trackers, sums in zip([self, *self.by_number.values()], captured, strict=True):
            trackers.load_state_dict(sums)

    def own_sums(self) -> list[dict[str, tuple[float, float]]]:
        """Return the sums of each logical process of this rank."""
        return [sums for trackers in self.by_number.values() for sums in trackers.own_sums()]

    def load_sums(self, sums: list[dict[str, tuple[float, float]]]) -> None:
        """Load the sums of all logical processes, in their order; those of missing ones are 0."""
        for number, trackers in self.by_number.items():
            for name, (total, count) in sums[number].items() if number < len(sums) else ():
                value = total / count if count else 0.0
                state = {"total_loss": total, "running_count": count, "loss_value": value}
                trackers.of(name).load_state_dict(state)
