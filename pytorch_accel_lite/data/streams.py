"""Loaders for streams: data that cannot be indexed and that belong to all processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice

import torch
from torch.utils.data import DataLoader

from pytorch_accel_lite.base.generator_states import preserving_generators
from pytorch_accel_lite.base.types import StateDict
from pytorch_accel_lite.data.batch_sizes import infer_batch_size
from pytorch_accel_lite.data.batches import Batch
from pytorch_accel_lite.data.iterables import PreShardedLoader, SequentialLoader
from pytorch_accel_lite.data.loader import LoaderOptions, copy_loader
from pytorch_accel_lite.data.lockstep import AgreedStep, deal_batches
from pytorch_accel_lite.data.shares import count_global_batches, grouped
from pytorch_accel_lite.data.sources import BatchData, Sample, Source, SourceState
from pytorch_accel_lite.data.stream_shards import can_be_divided, division_method, part_of
from pytorch_accel_lite.distributed import Ranks

_END = object()  # marks the end of a part
#: Key, in a position, of the positions in all parts of a stream.
_PARTS = "parts_of_a_divided_stream"


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
        return {_PARTS: [part.part_position() for part in self._parts]} if self._parts else super().position()

    def move_to(self, position: SourceState) -> str:
        """Make the next, resumed epoch begin at a position in the stream, or at the positions in its parts."""
        self._parts = []
        if not _is_divided(position) or not can_be_divided(self.source.dataset):
            return super().move_to(position)
        count = len(position[_PARTS])
        notes = [
            f"This epoch was read in {count} parts, one by each process. The first process reads what is left of them "
            "for all."
        ]
        for number, part_position in enumerate(position[_PARTS]):
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


def _is_divided(position: SourceState) -> bool:
    return isinstance(position, dict) and _PARTS in position


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
        return {_PARTS: self._ranks.all_gather_object(local)}

    def epoch_state(self) -> SourceState:
        """Return the identity of the epoch in all parts. Call it on every process."""
        return {_PARTS: self._ranks.all_gather_object(super().epoch_state())}

    def restore_epoch_state(self, read: SourceState) -> None:
        """Remember the epoch that this part has read last, if the interrupted run had equally many parts."""
        is_alike = _is_divided(read) and len(read[_PARTS]) == self._ranks.world_size
        super().restore_epoch_state(read[_PARTS][self._ranks.rank] if is_alike else None)

    def move_to(self, position: SourceState) -> str:
        """Make the next, resumed epoch begin at the position of this part, or complete an epoch with other parts."""
        self._completes_undivided = not _is_divided(position) or len(position[_PARTS]) != self._ranks.world_size
        if self._completes_undivided:
            return self._undivided.move_to(position)
        local = position[_PARTS][self._ranks.rank]
        self._samples, self._batches = int(local["samples"]), int(local.get("batches", 0))
        return super().move_to(local["position"])
