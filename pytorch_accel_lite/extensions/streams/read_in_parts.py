"""Streams of all processes that can be divided: each process reads its part."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader

from pytorch_accel_lite.extension_tools.data_and_batches import (
    Batch,
    BatchData,
    LoaderOptions,
    Sample,
    Source,
    SourceState,
    copy_loader,
)
from pytorch_accel_lite.extension_tools.processes import Ranks
from pytorch_accel_lite.extension_tools.random_numbers import preserving_generators
from pytorch_accel_lite.extensions.streams.lockstep import AgreedStep
from pytorch_accel_lite.extensions.streams.read_by_each import PreShardedLoader
from pytorch_accel_lite.extensions.streams.read_by_first import PARTS, StreamLoader, is_divided
from pytorch_accel_lite.extensions.streams.stream_shards import division_method


class DividedLoader(PreShardedLoader):
    """The batches of a stream that can be divided: each process reads a part.

    If an epoch is resumed by another number of processes, or was not read in parts, a ``StreamLoader`` completes it in
    the way in which it was begun.
    """

    has_own_position = False
    _finds_filler = True

    def __init__(
        self, source: DataLoader[Sample], part: Source, ranks: Ranks, device: torch.device, options: LoaderOptions
    ) -> None:
        super().__init__(copy_loader(source, dataset=part), ranks, device, options, division_method(source.dataset))
        self._undivided = StreamLoader(source, ranks, device, options)
        self._completes_undivided = False
        self._samples = self._batches = 0  # of this part in this epoch

    def _read_steps(self, epoch: int, start: int) -> Iterator[Batch]:
        if start and self._completes_undivided:
            self._undivided.limit = self.limit
            return self._undivided.steps(epoch, start, self._steps_done)
        self._completes_undivided = False
        if not start:
            self._samples = self._batches = 0
        return self._counted(super()._read_steps(epoch, start))

    def _counted(self, steps: Iterator[Batch]) -> Iterator[Batch]:
        for step in steps:
            self._samples += step.num_samples or 0
            self._batches += bool(step.num_samples)
            yield step

    def _steps_together(self, start: int) -> Iterator[Batch]:
        return self._in_step(self._samples if start else 0)

    def _filler(self, first: AgreedStep[BatchData]) -> BatchData:
        """Return a filler batch: the last batch of a part that ended before the resumption, or of another part."""
        batch = next(item for item in self._ranks.all_gather_object(first.item) if item is not None)
        if self._samples and first.item is None:
            with preserving_generators():
                (batch,) = deque(self._open(0), maxlen=1)
        return batch

    def stop_workers(self) -> None:
        """Also stop the workers of the loader that completes an epoch with other parts."""
        super().stop_workers()
        self._undivided.stop_workers()

    def position(self) -> SourceState:
        """Return the positions in all parts. Call it on every process."""
        if self._completes_undivided:
            return self._undivided.position()
        local = {"samples": self._samples, "batches": self._batches, "position": super().position()}
        return {PARTS: self._ranks.all_gather_object(local)}

    def epoch_state(self) -> SourceState:
        """Return the identity of the epoch in all parts. Call it on every process."""
        return {PARTS: self._ranks.all_gather_object(super().epoch_state())}

    def restore_epoch_state(self, read: SourceState) -> None:
        """Remember the epoch that this part has read last, if the interrupted run had equally many parts."""
        is_alike = is_divided(read) and len(read[PARTS]) == self._ranks.world_size
        super().restore_epoch_state(read[PARTS][self._ranks.rank] if is_alike else None)
        self._undivided.restore_epoch_state(read[PARTS][0] if is_divided(read) else read)

    def move_to(self, position: SourceState) -> str:
        """Make the next, resumed epoch begin at the position of this part, or complete an epoch with other parts."""
        self._completes_undivided = not is_divided(position) or len(position[PARTS]) != self._ranks.world_size
        if self._completes_undivided:
            return self._undivided.move_to(position)
        local = position[PARTS][self._ranks.rank]
        self._samples, self._batches = int(local["samples"]), int(local.get("batches", 0))
        return super().move_to(local["position"])
