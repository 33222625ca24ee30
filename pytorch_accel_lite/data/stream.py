"""Batches of streams: rank 0 reads them, and deals them out."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from pytorch_accel_lite.batches import find_batch_size
from pytorch_accel_lite.data.loader import Batch, ShardedLoader, in_groups, with_last
from pytorch_accel_lite.data.plan import count_global_batches


class StreamLoader(ShardedLoader):
    """The batches of a ``DataLoader`` that cannot be indexed: rank 0 reads them all and deals them out in turn.

    So every sample is seen once, whatever the randomness of the stream. Resuming in the middle of an epoch reads
    and drops what came before.
    """

    def _steps(self, epoch: int, start: int) -> Iterator[Batch]:
        dataset = self.source.dataset
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)
        return self._steps_alone(start) if self._ranks.world_size == 1 else self._deal_out(start)

    def _deal_out(self, start: int) -> Iterator[Batch]:
        rank = self._ranks.rank
        groups = in_groups(self._read_from(start), self._ranks.world_size)
        steps = with_last(islice(groups, self._left))
        is_last = False
        while not is_last:  # a process without a batch in it is done: the others may communicate before they ask again
            step = self._ranks.broadcast_object(lambda: next(steps, None))
            if step is None:
                return
            group, is_last = step
            sizes = [find_batch_size(batch) for batch in group]
            if rank < len(group):
                yield Batch(group[rank], sizes[rank], sum(sizes), is_last)
            elif self.options.fill:
                yield Batch(group[0], 0, sum(sizes), is_last)

    def _num_steps(self) -> int:
        return count_global_batches(len(self.source), self._ranks.world_size)
