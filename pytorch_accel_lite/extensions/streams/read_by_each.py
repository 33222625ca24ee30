"""Batches that each process reads for itself: those of the user's own, and of streams that shard themselves."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from operator import attrgetter
from typing import ClassVar

import torch

from pytorch_accel_lite.extension_tools.data_and_batches import (
    Batch,
    BatchData,
    LoaderOptions,
    OwnShard,
    Source,
    find_length,
    infer_batch_size,
    skip_samples,
)
from pytorch_accel_lite.extension_tools.processes import Ranks
from pytorch_accel_lite.extension_tools.random_numbers import preserving_generators
from pytorch_accel_lite.extensions.streams.discarding_seen_batches import cannot_split
from pytorch_accel_lite.extensions.streams.lockstep import AgreedStep, Lockstep
from pytorch_accel_lite.extensions.streams.sequential_loader import SequentialLoader


class PreShardedLoader(SequentialLoader):
    """The batches of any other iterable, which are assumed to be this process's own.

    In training, the processes agree on the number of samples in each step, for several steps at once and while they
    compute the previous one. A process that has no batch left repeats its last one with zero weight until the others
    are done.

    Args:
        source: the iterable
        ranks: the processes that read different data
        device: the device of the batches
        options: how the source is read
        shared_by: name of the mechanism by which a stream shards itself, if detected
    """

    has_own_position = True
    _finds_filler: ClassVar[bool] = False  # whether a process can resume after its last batch

    def __init__(
        self, source: Source, ranks: Ranks, device: torch.device, options: LoaderOptions, shared_by: str = ""
    ) -> None:
        is_marked = isinstance(source, OwnShard)
        source = source.batches if is_marked else source
        super().__init__(source, ranks, device, options)
        self.shared_by = shared_by
        if ranks.world_size > 1 and not (shared_by or is_marked):
            self.undivided = type(source).__name__
        length = find_length(source)
        self._length = int(ranks.max([-1 if length is None else length])[0])

    @property
    def _reads_alone(self) -> bool:
        return self._ranks.world_size == 1 or not self.options.fill

    def _steps_together(self, start: int) -> Iterator[Batch]:
        done = 0
        if start and not self._ranks.max([self._tracker is None or self._tracker.position is None])[0]:
            done = start
        steps = self._in_step(done)
        if start > done:
            with preserving_generators():
                steps = skip_samples(steps, start - done, attrgetter("total_samples"), _refuse_to_split)
        yield from steps

    def _in_step(self, start: int) -> Iterator[Batch]:
        """Yield the steps from the position of a stateful source, or from the beginning if ``start`` is 0."""
        tracker = self._tracker
        source = islice(self._read_lazily(start), self._left if start else self.limit)
        batch = None
        for step in Lockstep(source, self._ranks, infer_batch_size):
            if batch is None and step.without:
                batch = self._filler(step)
            if step.item is not None:
                batch = step.item
                if tracker is not None:
                    tracker.advance()
            if tracker is not None and tracker.is_used_up and not (step.is_last or self._finds_filler):
                tracker.position = None  # to resume, the last batch must be read again
            yield Batch(batch, step.number, step.total, step.is_last)

    def _read_lazily(self, start: int) -> Iterator[BatchData]:
        """Open the source when its first batch is read, so that a failure counts as a failure to read that batch."""
        yield from self._read_identically(start)

    def _filler(self, first: AgreedStep[BatchData]) -> BatchData:
        """Return a filler batch for the first step, if some processes have no batch in it."""
        raise ValueError(
            f"{first.without} of {self._ranks.world_size} processes have no training batch at all. Give every process "
            "at least one."
        )

    def _num_steps(self) -> int:
        return self._length if self._length >= 0 else len(self.source)  # raises the source's own error


def _refuse_to_split(batch: Batch, count: int) -> Batch:
    raise cannot_split("the batches of several processes")
