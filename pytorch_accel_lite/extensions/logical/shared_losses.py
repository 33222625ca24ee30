"""Running losses whose sums over all processes do not depend on the number of processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from pytorch_accel_lite.extending import BatchOutput, LossTrackers, Shares
from pytorch_accel_lite.extension_tools.optimizers_and_gradients import Count


class SharedLossTrackers(LossTrackers):
    """Running losses of this process, which are displayed, and of each of its logical processes.

    The latter are added up in the order of the logical processes for the means over all processes.

    Args:
        shares: the logical processes that this process computes
        current: returns the number of the logical process that is being computed

    Attributes:
        by_number: the running losses of each logical process of this one, and of the others that have been loaded
    """

    def __init__(self, shares: Shares, current: Callable[[], int]) -> None:
        super().__init__()
        self._current = current
        self._shares = shares
        self.by_number = {number: LossTrackers() for number in range(shares.total)}
        self._postponed: Callable[[], object] | None = None

    def add(self, output: BatchOutput) -> None:
        """Add the losses of a share."""
        super().add(output)
        self.by_number[self._current()].add(output)

    def log(self, name: str, value: torch.Tensor | float, weight: Count) -> None:
        """Add a value of a share under its own name."""
        super().log(name, value, weight)
        self.by_number[self._current()].log(name, value, weight)

    @property
    def first_local(self) -> int:
        """The number of the first logical process of this rank."""
        return self._shares.local[0]

    def local_sums(self) -> list[dict[str, tuple[float, float]]]:
        """Return the sums of each logical process of this rank."""
        return [sums for number in self._shares.local for sums in self.by_number[number].local_sums()]

    def load_sums(self, sums: Iterable[dict[str, tuple[float, float]]], first: int = 0) -> None:
        """Load the sums of logical processes, in their order; those of missing ones stay as they are.

        Args:
            first: number of the first of them
        """
        for number, by_name in zip(range(first, len(self.by_number)), sums, strict=False):
            trackers = self.by_number[number] = LossTrackers()
            for name, (total, count) in by_name.items():
                trackers.of(name).load_sum(total, count)

    def postpone(self, load: Callable[[], object]) -> None:
        """Load sums of logical processes of other ranks only when those are needed, in ``catch_up()``.

        Args:
            load: replaces an earlier postponed one
        """
        self._postponed = load

    def catch_up(self) -> None:
        """Load the sums that have been postponed, before other logical processes become those of this rank."""
        load, self._postponed = self._postponed, None
        if load is not None:
            load()

    def add_up_local(self) -> None:
        """Recompute the losses of this process from its logical processes, which have changed."""
        for name, (total, count) in self.add_up(self.local_sums()).items():
            self.of(name).load_sum(total, count)
