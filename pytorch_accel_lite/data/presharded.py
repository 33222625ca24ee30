"""Batches that are this process's own, already different on every process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch

from pytorch_accel_lite.batches import find_batch_size
from pytorch_accel_lite.data.loader import Batch, LoaderOptions, ShardedLoader, after_samples, cannot_split
from pytorch_accel_lite.data.order import find_length
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
        length = find_length(source)
        self._length = int(ranks.max([-1 if length is None else length])[0])

    def _steps(self, epoch: int, start: int) -> Iterator[Batch]:
        is_alone = self._ranks.world_size == 1 or not self.options.fill
        return self._steps_alone(start) if is_alone else self._steps_together(start)

    def _steps_together(self, start: int) -> Iterator[Batch]:
        with preserving_generators():
            steps = after_samples(self._in_step(), start, _total, _refuse_to_split)
        yield from steps

    def _in_step(self) -> Iterator[Batch]:
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
            raise TypeError(f"{type(self.source).__name__} has no length.")
        return self._length


def _total(step: Batch) -> int:
    return step.total_samples or 0


def _refuse_to_split(step: Batch, count: int) -> Batch:
    raise cannot_split("the batches of several processes")
