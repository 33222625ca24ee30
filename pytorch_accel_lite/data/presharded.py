"""Batches that are this process's own, already different on every process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from itertools import islice
from typing import Any

import torch

from pytorch_accel_lite.batches import find_batch_size
from pytorch_accel_lite.data.loader import Batch, LoaderOptions, ShardedLoader, cannot_split, ended, with_last
from pytorch_accel_lite.distributed import Ranks
from pytorch_accel_lite.randomness import preserving_generators


class OwnShard:
    """Marks batches that are this process's own, already different on every process.

    Return it from ``create_train_dataloader`` for a ``DataLoader`` over an ``IterableDataset`` that shards itself.
    Iterables that are no ``torch.utils.data.DataLoader`` are always taken to be such.
    """

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]


class PreShardedLoader(ShardedLoader):
    """The batches of any other iterable, taken to be this process's own.

    In training, the processes agree at every step on whether any has a batch left; one that has none repeats its
    last batch without weight until the others are done.
    """

    def __init__(self, source: Iterable[Any], ranks: Ranks, device: torch.device, options: LoaderOptions) -> None:
        super().__init__(source, ranks, device, options)
        self._no_length: TypeError | None = None
        try:
            length = float(len(source))  # type: ignore[arg-type]
        except TypeError as error:
            length = -1.0
            self._no_length = error
        self._length = int(ranks.max([length])[0])

    def _steps(self, epoch: int, start: int) -> Iterator[Batch]:
        if self._ranks.world_size == 1 or not self.options.fill:
            for batch, is_last in with_last(islice(self._read_from(start), self._left)):
                yield Batch(batch, None, None, is_last)
            return
        with preserving_generators() if start else nullcontext():
            steps = self._steps_together()
            samples = 0
            while samples < start:
                step = next(steps, None)
                if step is None:
                    raise ended("data", f"{samples} samples", start)
                samples += step.total_samples or 0
            if samples > start:
                raise cannot_split("the batches of several processes")
        yield from steps

    def _steps_together(self) -> Iterator[Batch]:
        batches = islice(self._start_reading(self.source), self.limit)
        batch = None
        ready = next(batches, None)
        while True:
            batch = batch if ready is None else ready
            size = 0 if ready is None else find_batch_size(batch)
            following = None if ready is None else next(batches, None)
            total, running, empty = self._ranks.sum([size, following is not None, batch is None])
            if total and empty:
                raise ValueError(
                    f"{int(empty)} of {self._ranks.world_size} processes have no training batch at all. Give every "
                    "process at least one."
                )
            if not total:
                return
            yield Batch(batch, size, int(total), not running)
            ready = following

    def _num_steps(self) -> int:
        if self._length < 0:
            raise TypeError(f"{type(self.source).__name__} has no length.") from self._no_length
        return self._length
