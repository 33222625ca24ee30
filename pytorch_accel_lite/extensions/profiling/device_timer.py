"""Times of computations on a device, without waiting for it."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from typing import Any, TypeAlias

import torch

from pytorch_accel_lite.extension_tools.modules_and_devices import is_asynchronous, record_event

#: An event of a device; for a device that computes synchronously, a time in seconds.
Moment: TypeAlias = Any


class DeviceTimer:
    """Measures phases of computation on a device by events that are read later, so that no step waits."""

    #: Number of phases after which the events of finished phases are read.
    MAX_PENDING = 300

    def __init__(self, device: torch.device) -> None:
        self._device = device if is_asynchronous(device) else None
        self._pending: deque[tuple[str, Moment, Moment]] = deque()
        self._seconds: dict[str, float] = defaultdict(float)

    def now(self) -> Moment:
        """Return the current moment: an event of the device, or the time if it computes synchronously."""
        return time.perf_counter() if self._device is None else record_event(self._device, enable_timing=True)

    def add(self, phase: str, begin: Moment, end: Moment) -> None:
        """Count the time between two moments towards a phase."""
        self._pending.append((phase, begin, end))
        if self._device is None:
            self._count_oldest_phase()
        while len(self._pending) > self.MAX_PENDING and self._pending[0][2].query():
            self._count_oldest_phase()

    def take(self) -> dict[str, float]:
        """Return the seconds by phase since the last call, waiting for the device if it has not finished."""
        if self._pending:
            self._pending[-1][2].synchronize()
        while self._pending:
            self._count_oldest_phase()
        seconds, self._seconds = self._seconds, defaultdict(float)
        return seconds

    def _count_oldest_phase(self) -> None:
        phase, begin, end = self._pending.popleft()
        self._seconds[phase] += end - begin if self._device is None else begin.elapsed_time(end) / 1e3
