"""Streams of all processes that the first one reads: it deals out the batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice

import torch

from pytorch_accel_lite.extension_tools.data_and_batches import (
    Batch,
    BatchData,
    LoaderOptions,
    Source,
    SourceState,
    copy_loader,
    count_global_batches,
    grouped,
    infer_batch_size,
)
from pytorch_accel_lite.extension_tools.plain_types import StateDict
from pytorch_accel_lite.extension_tools.processes import Ranks
from pytorch_accel_lite.extensions.streams.lockstep import deal_batches
from pytorch_accel_lite.extensions.streams.sequential_loader import SequentialLoader
from pytorch_accel_lite.extensions.streams.stream_shards import can_be_divided, part_of

_END = object()  # marks the end of a part
#: Key, in a position, of the positions in all parts of a stream.
PARTS = "parts_of_a_divided_stream"


class StreamLoader(SequentialLoader):
    """The batches of a ``DataLoader`` over a stream. Rank 0 reads all batches and sends them to the ranks in turn.

    So every sample is seen once, even if the stream is random. If each process had read its own part of an epoch before
    an interruption, rank 0 reads the rest of the epoch part by part.
    """

    def __init__(self, source: Source, ranks: Ranks, device: torch.device, options: LoaderOptions) -> None:
        super().__init__(source, ranks, device, options)
        self._batches_per_step = ranks.world_size
        self._parts: list[_Part] = []  # the parts of a resumed epoch

    def _read_steps(self, epoch: int, start: int) -> Iterator[Batch]:
        if not start:
            self._parts = []
        return super()._read_steps(epoch, start)

    @property
    def _reads_alone(self) -> bool:
        return self._ranks.world_size == 1 and not self._parts

    @property
    def _reads_again(self) -> bool:
        parts = self._parts
        return any(part._reads_again for part in parts) if parts else super()._reads_again  # noqa: SLF001

    def _steps_together(self, start: int) -> Iterator[Batch]:
        groups = islice(self._groups(start), self._left)
        for batch, num_read in deal_batches(groups, self._ranks, self.options.fill):
            self._advance_past(num_read)
            if self.options.fill or not batch.is_filler:
                yield batch

    def _groups(self, start: int) -> Iterator[list[BatchData]]:
        """Yield the batches of all processes in each step. Nothing is read before the first step is requested."""
        batches = self._read_parts() if self._parts else self._read_from(start)
        yield from grouped(batches, self._ranks.world_size)

    def _read_parts(self) -> Iterator[BatchData]:
        """Yield a batch of each part in turn, each part from its own position on."""
        self._dealt: deque[tuple[_Part, int]] = deque()
        reading = deque((part, part.begin(self._epoch)) for part in self._parts)
        while reading:
            part, batches = reading.popleft()
            batch = next(batches, _END)
            if batch is not _END:
                reading.append((part, batches))
                self._dealt.append((part, infer_batch_size(batch)))
                yield batch

    def _advance_past(self, num_batches: int) -> None:
        """Advance the position past batches of this process that are about to be used."""
        if self._parts:
            for _ in range(num_batches):
                part, size = self._dealt.popleft()
                part.advance(size)
        elif num_batches and self._tracker is not None:
            self._tracker.advance(num_batches)

    def position(self) -> SourceState:
        """Return the position in the stream, or in each of its parts."""
        return {PARTS: [part.part_position() for part in self._parts]} if self._parts else super().position()

    def move_to(self, position: SourceState) -> str:
        """Make the next, resumed epoch begin at a position in the stream, or at the positions in its parts."""
        self._parts = []
        if not is_divided(position) or not can_be_divided(self.source.dataset):
            return super().move_to(position)
        count = len(position[PARTS])
        notes = [
            f"This epoch was read in {count} parts, one by each process. The first process reads what is left of them "
            "for all."
        ]
        for number, part_position in enumerate(position[PARTS]):
            dataset = part_of(self.source.dataset, number, count)
            if dataset is None:
                raise ValueError(
                    f"The training data, a {type(self.source.dataset).__name__}, were read in {count} parts when the "
                    "state was saved, but cannot be divided into as many now. Create them as they were."
                )
            part = _Part(copy_loader(self.source, dataset=dataset), self._ranks, self.device, self.options)
            part._draws_own = self._draws_own  # noqa: SLF001
            notes.append(part.move_to_part(number, part_position))
            self._parts.append(part)
        return " ".join(filter(None, dict.fromkeys(notes)))

    def stop_workers(self) -> None:
        """Also stop the workers of all parts."""
        super().stop_workers()
        for part in self._parts:
            part.stop_workers()

    def _num_steps(self) -> int:
        return count_global_batches(len(self.source), self._ranks.world_size)


def is_divided(position: SourceState) -> bool:
    """Whether a position is that of a stream of which each process has read a part."""
    return isinstance(position, dict) and PARTS in position


class _Part(StreamLoader):
    """The rest of a part of a stream, after the samples that a process of the interrupted run has read."""

    _compares_generators = False

    def move_to_part(self, number: int, position: StateDict) -> str:
        """Make the epoch continue at a position in this part; see ``move_to()``.

        Args:
            number: the number of the part
        """
        self._batches_per_step = 1
        self._reader = number
        self._samples = int(position["samples"])
        self._steps_done = int(position.get("batches", 0))
        return self.move_to(position["position"])

    def begin(self, epoch: int) -> Iterator[BatchData]:
        """Start reading the rest of the part."""
        self._epoch = epoch
        self._set_epoch(epoch)
        return self._read_from(self._samples)

    def advance(self, size: int) -> None:
        """Advance the position past the next batch."""
        self._samples += size
        self._steps_done += 1
        self._advance_past(1)

    def part_position(self) -> StateDict:
        """Return the position in the part."""
        return {"samples": self._samples, "batches": self._steps_done, "position": self.position()}
