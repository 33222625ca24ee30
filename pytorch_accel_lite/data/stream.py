"""Batches of streams: rank 0 reads them, and deals them out."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice

from pytorch_accel_lite.batches import find_batch_size
from pytorch_accel_lite.data.loader import Batch, ShardedLoader, with_last
from pytorch_accel_lite.data.plan import count_global_batches


class StreamLoader(ShardedLoader):
    """The batches of a ``DataLoader`` that cannot be indexed: rank 0 reads them all and deals them out in turn.

    So every sample is seen once, whatever the randomness of the stream. Going on in the middle of an epoch reads
    and drops what came before.
    """

    def _steps(self, epoch: int, start: int) -> Iterator[Batch]:
        dataset = self.source.dataset
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)
        if self._ranks.world_size == 1:
            for batch, is_last in with_last(islice(self._read_from(start), self._left)):
                yield Batch(batch, None, None, is_last)
            return
        batches = self._read_from(start)  # on rank 0
        groups = iter(lambda: list(islice(batches, self._ranks.world_size)), [])
        steps = chain(with_last(islice(groups, self._left)), [None])
        is_last = False
        while (
            not is_last
        ):  # then a process without a batch is done: the others may communicate before they ask for another
            step = self._ranks.broadcast_object(lambda: next(steps))
            if step is None:
                return
            group, is_last = step
            sizes = [find_batch_size(batch) for batch in group]
            if self._ranks.rank < len(group):
                yield Batch(group[self._ranks.rank], sizes[self._ranks.rank], sum(sizes), is_last)
            elif self.options.fill:
                yield Batch(group[0], 0, sum(sizes), is_last)

    def _num_steps(self) -> int:
        return count_global_batches(len(self.source), self._ranks.world_size)
