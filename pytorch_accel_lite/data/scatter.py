"""Dealing out the batches of a stream: one process reads, and sends each of the others its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from pytorch_accel_lite.base.batches import find_batch_size
from pytorch_accel_lite.base.randomness import preserving_generators
from pytorch_accel_lite.distributed import Ranks
from pytorch_accel_lite.distributed.messages import Message, read_message, write_number

#: In place of the size of the next messages: there are none, or the data cannot be read.
ENDED, FAILED = 0, -1


class Dealt(NamedTuple):
    """What a process is dealt for a step.

    :param data: its batch
    :param num_samples: number of samples in it; 0 for a filler batch
    :param total_samples: number of samples in the batches of all processes
    :param num_batches: on the process that reads, the number of batches that it has read for this step
    """

    data: Any
    num_samples: int
    total_samples: int
    num_batches: int = 0


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
        self._next: tuple[Dealt, list[Message]]
        self._error: Exception | None = None

    def prepare(self) -> int:
        """Read the next step, and return the size of its messages."""
        # Generators that must be the same on processes that do not read are left as they are.
        with preserving_generators() if self._ranks.replicas > 1 else nullcontext():
            group = next(self._groups, None)
        if group is None:
            return ENDED
        sizes = [find_batch_size(batch) for batch in group]
        dealt = [Dealt(batch, size, sum(sizes)) for batch, size in zip(group, sizes, strict=True)]
        filler = Dealt(group[0] if self._fill else None, 0, sum(sizes))
        dealt += [filler] * (self._ranks.world_size - len(group))
        messages = [Message(part) for part in dealt[self._first_sent :]]
        self._next = dealt[0]._replace(num_batches=len(group)), messages
        return max((message.size for message in messages), default=1)

    def begin(self, size: int) -> Callable[[], tuple[int, Dealt]]:
        """Begin to send and receive the messages of a step; the process that reads also prepares the next step.

        :param size: number of bytes in each
        :return: waits for what this process is dealt, and returns it after the size of the next messages
        """
        if not self._reads:
            receive = self._ranks.begin_scatter(None, size)
            return lambda: read_message(receive())
        own, messages = self._next
        pieces = torch.empty(self._ranks.world_size, size, dtype=torch.uint8).unbind()
        for piece, message in zip(pieces[self._first_sent :], messages, strict=True):
            message.write(piece)
        try:
            following = self.prepare()
        except Exception as error:
            self._error = error
            following = FAILED
        for piece in pieces[self._first_sent :]:
            write_number(piece, following)
        finish = self._ranks.begin_scatter(pieces, size)

        def receive_own() -> tuple[int, Dealt]:
            finish()
            return following, own

        return receive_own

    def fail(self) -> None:
        """Raise the error that reading has met, on the process that reads."""
        if self._error is not None:
            raise self._error
