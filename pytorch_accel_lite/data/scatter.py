"""Dealing out the batches of a stream: one process reads, and sends each of the others its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from pytorch_accel_lite.base.batches import Batch, find_batch_size
from pytorch_accel_lite.base.randomness import preserving_generators
from pytorch_accel_lite.distributed import Ranks
from pytorch_accel_lite.distributed.messages import Message, read_message, write_number

#: In place of the size of the next messages: there are none, or the data cannot be read.
_ENDED, _FAILED = 0, -1


def batch_of(rank: int, group: Sequence[Any], sizes: Sequence[int]) -> Batch:
    """Return the batch of a process in a step, a filler batch if there are fewer than processes.

    :param group: the batches of all processes
    :param sizes: their numbers of samples
    """
    has_own = rank < len(group)
    return Batch(group[rank if has_own else 0], sizes[rank] if has_own else 0, sum(sizes), is_last=False)


class Deal:
    """Reads the steps on rank 0, and sends all processes their batches a step ahead.

    Each message holds the size of the next one, so a process can begin to receive that before it computes a step.

    :param groups: the batches of all processes in each step, which only rank 0 reads
    :param fill: whether a process that has no samples left in a step is sent a filler batch
    """

    def __init__(self, groups: Iterator[list[Any]], ranks: Ranks, fill: bool) -> None:
        self._groups = groups
        self._ranks = ranks
        self._fill = fill
        self._reads = ranks.rank == 0 and ranks.is_first_alike
        self._first_sent = 0 if ranks.replicas > 1 else 1  # the process that reads need not be sent its own batch
        self._next: tuple[Batch, int, list[Message]]
        self._error: Exception | None = None

    def steps(self) -> Iterator[tuple[Batch, int]]:
        """Yield this process's batch of each step, and how many batches it has itself read for the step."""
        size = self._ranks.broadcast_object(self._prepare)
        if size != _ENDED:
            receive = self._begin(size)
        while size != _ENDED:
            size, batch, num_read = receive()
            if size == _FAILED:
                self._ranks.run_together(self._fail)
            if size != _ENDED:
                receive = self._begin(size)
            yield batch._replace(is_last=size == _ENDED), num_read

    def _prepare(self) -> int:
        """Read the next step, and return the size of its messages."""
        # Generators that must be the same on processes that do not read are left as they are.
        with preserving_generators() if self._ranks.replicas > 1 else nullcontext():
            group = next(self._groups, None)
        if group is None:
            return _ENDED
        sizes = [find_batch_size(batch) for batch in group]
        dealt = [batch_of(rank, group, sizes) for rank in range(self._ranks.world_size)]
        if not self._fill:
            dealt[len(group) :] = [batch._replace(data=None) for batch in dealt[len(group) :]]
        messages = [Message(batch) for batch in dealt[self._first_sent :]]
        self._next = dealt[0], len(group), messages
        return max((message.size for message in messages), default=1)

    def _begin(self, size: int) -> Callable[[], tuple[int, Batch, int]]:
        """Begin to send and receive the messages of a step; the process that reads also prepares the next step.

        :param size: number of bytes in each
        :return: waits for this process's batch, and returns it with the size of the next messages
        """
        if not self._reads:
            receive = self._ranks.begin_scatter(None, size)
            return lambda: (*read_message(receive()), 0)
        batch, num_read, messages = self._next
        pieces = torch.empty(self._ranks.world_size, size, dtype=torch.uint8).unbind()
        for piece, message in zip(pieces[self._first_sent :], messages, strict=True):
            message.write(piece)
        try:
            following = self._prepare()
        except Exception as error:
            self._error = error
            following = _FAILED
        for piece in pieces[self._first_sent :]:
            write_number(piece, following)
        finish = self._ranks.begin_scatter(pieces, size)

        def receive_own() -> tuple[int, Batch, int]:
            finish()
            return following, batch, num_read

        return receive_own

    def _fail(self) -> None:
        """Raise the error that reading has met, on the process that reads."""
        if self._error is not None:
            raise self._error
