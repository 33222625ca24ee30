"""Timing a part of some steps, and finding the process that the others wait for."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import torch

from pytorch_accel_lite.base.devices import is_asynchronous, record_event
from pytorch_accel_lite.base.protocols import TrainerLike

_WARM_UP_STEPS = 3
_STEPS = 20
# Reported is a forward pass that takes this many times as long as the others' and costs this share of the epoch.
_FACTOR = 1.3
_SHARE = 0.1


class PartTimes:
    """Times a part of some steps.

    On a GPU, device events are recorded, and read at the end of the epoch.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_gpu = is_asynchronous(device)
        self._marks: list[tuple[Any, Any]] = []
        self._start: Any = None

    def _now(self) -> Any:
        return record_event(self._device, enable_timing=True) if self._on_gpu else time.perf_counter()

    def start(self) -> None:
        """Note the start of the part."""
        self._start = self._now()

    def stop(self) -> bool:
        """Note the end of the part; return whether enough have been timed. Only the first of a step counts."""
        if self._start is not None:
            self._marks.append((self._start, self._now()))
        self._start = None
        return len(self._marks) >= _WARM_UP_STEPS + _STEPS

    def seconds(self) -> float:
        """Return the median time of the part; 0 if too few were timed."""
        marks = self._marks[_WARM_UP_STEPS:]
        if not marks:
            return 0.0
        if not self._on_gpu:
            return float(median(end - start for start, end in marks))
        marks[-1][1].synchronize()
        return float(median(start.elapsed_time(end) for start, end in marks)) / 1e3

    def advise(self, trainer: TrainerLike, epoch: float, min_seconds: float) -> Iterator[str]:
        """Yield advice on the slowest process, if forward passes were timed. Call it on every process.

        In these, processes do not wait for each other, unlike in backward passes.

        :param epoch: seconds that the epoch took
        :param min_seconds: shortest time lost in the epoch that is worth reporting
        """
        mine = trainer.train_dataloader.seconds_waited, self.seconds(), trainer.progress.step
        waits, forwards, steps = zip(*trainer.all_gather_object(mine), strict=True)
        lost = max(_SHARE * max(epoch, 1e-9), min_seconds)
        rank, longest, others = _slowest(waits)
        if longest - others >= lost:
            yield (
                f"Rank {rank} waited for data for {longest:.1f} seconds, the other processes for {others:.1f}, and "
                "every step waits for all of them. Look at the disk, the network and the cores of its machine."
            )
        rank, longest, others = _slowest(forwards)
        if longest >= _FACTOR * others > 0 and (longest - others) * steps[rank] >= lost:
            yield (
                f"Forward passes take {longest * 1e3:.3g} ms on rank {rank}, {longest / others:.1f} times as long as "
                f"on the other processes ({others * 1e3:.3g} ms), and every step waits for it. Look whether its device "
                "is shared, throttled or a slower one, and whether its samples are longer."
            )


def _slowest(seconds: Sequence[float]) -> tuple[int, float, float]:
    """Return the rank with the most seconds, its seconds, and the median of the others."""
    rank = max(range(len(seconds)), key=seconds.__getitem__)
    return rank, seconds[rank], median([*seconds[:rank], *seconds[rank + 1 :]])
