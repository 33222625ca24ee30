"""What processes tell each other of what they read, a few steps ahead: how much each has, or the batches themselves."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from pytorch_accel_lite.base.batches import Batch, find_batch_size, parts_in
from pytorch_accel_lite.base.randomness import preserving_generators
from pytorch_accel_lite.distributed import Ranks
from pytorch_accel_lite.distributed.messages import Message, decode

T = TypeVar("T")

#: Steps about which the processes agree at once: at first one, then twice as many each time, up to these bounds.
_MOST_STEPS = 8
_LEAST_STEPS = 2  # of which one is computed while the processes agree
#: Bytes of batches that a process reads ahead for that, if they are more than those of the fewest steps.
_MOST_BYTES = 2**25


class AgreedStep(NamedTuple):
    """A step for which any process has read something.

    :param item: what this process has read; ``None`` if its source has ended
    :param number: the number that describes it; 0 if there is none
    :param total: the sum of the numbers of all processes
    :param without: number of processes that have read nothing
    """

    item: Any
    number: int
    total: int
    without: int
    is_last: bool


@dataclass(eq=False, repr=False)
class _Round(Generic[T]):
    """Steps about which the processes agree at once: what this process has read for them, with a number for each."""

    steps: int
    items: deque[T] = field(default_factory=deque)
    numbers: list[int] = field(default_factory=list)


class Lockstep(Generic[T]):
    """Reads in step with the other processes, which are told about each item that is read.

    While the steps that the processes know about are computed, those that follow are read little by little.

    :param source: what is read in each step
    :param describe: returns a number for an item; not 0 if the numbers are to be equal
    :param unequal: the error to raise if the numbers for a step differ; ``None`` if they are to be added up
    """

    def __init__(
        self, source: Iterator[T], ranks: Ranks, describe: Callable[[T], int], unequal: ValueError | None = None
    ) -> None:
        self._source = source
        self._ranks = ranks
        self._describe = describe
        self._unequal = unequal
        self._error: Exception | None = None

    def __iter__(self) -> Iterator[AgreedStep]:
        """Yield the steps for which any process has read something."""
        following = _Round[T](steps=1)
        self._read(following, 1)
        next_reports = self._begin_reporting(following)()
        has_next = self._any_has_read(next_reports, 0)
        while has_next:
            current, reports = following, next_reports
            following = _Round(self._steps_after(current, reports))
            pauses = max(current.steps - 1, 1)
            for index in range(current.steps):
                if index < pauses:
                    self._read(following, -(-following.steps * (index + 1) // pauses))
                if index == pauses - 1:
                    finish = self._begin_reporting(following)
                if index + 1 < current.steps:
                    has_next = self._any_has_read(reports, index + 1)
                else:
                    next_reports = finish()
                    has_next = self._any_has_read(next_reports, 0)
                item = current.items.popleft() if current.items else None
                without = sum(count <= index for count, *_ in reports)
                total = sum(report[3 + index] for report in reports)
                yield AgreedStep(item, current.numbers[index], total, without, not has_next)
                if not has_next:
                    return

    def _read(self, steps: _Round[T], count: int) -> None:
        """Read the first ``count`` items for some steps."""
        try:
            for item in islice(self._source, count - len(steps.items)):
                steps.numbers.append(self._describe(item))
                steps.items.append(item)
        except Exception as error:
            self._error = error
            self._source = iter(())

    def _begin_reporting(self, steps: _Round[T]) -> Callable[[], list[list[int]]]:
        """Begin to tell the other processes what has been read for some steps.

        :return: waits for the reports of all: how many items each has read, whether it failed to read more, the bytes
            of an item, and the number for each step
        """
        count = len(steps.items)
        steps.numbers = steps.numbers[:count] + [0] * (steps.steps - count)
        size = sum(map(_size_of, parts_in([*steps.items][:1])))
        return self._ranks.begin_gathering([count, self._error is not None, size, *steps.numbers])

    def _any_has_read(self, reports: list[list[int]], index: int) -> bool:
        """Whether any process has read something for a step.

        :raises Exception: on all processes, if one of them could not read for this step, or if the numbers differ
        """
        if any(has_failed and count == index for count, has_failed, *_ in reports):
            self._ranks.run_together(self._fail)
        if self._unequal is not None and len({report[3 + index] for report in reports}) > 1:
            raise self._unequal
        return any(count > index for count, *_ in reports)

    def _steps_after(self, steps: _Round[T], reports: list[list[int]]) -> int:
        """Return the number of steps about which to agree after others."""
        largest = max(size for _, _, size, *_ in reports)
        most = min(_MOST_BYTES // max(largest, 1), _MOST_STEPS)
        return min(2 * steps.steps, max(most, _LEAST_STEPS))

    def _fail(self) -> None:
        if self._error is not None:
            raise self._error


def _size_of(part: Any) -> int:
    """Return the number of bytes of a part of a batch; for a sparse tensor, which has fewer, those of a dense one."""
    return part.numel() * part.element_size() if isinstance(part, torch.Tensor) else getattr(part, "nbytes", 0)


#: In place of the size of the next messages: there are none, or the data cannot be read.
_ENDED, _FAILED = 0, -1
_FRONT = 64  # bytes before a message, which hold the size of the next one


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
        self._reads = ranks.rank == 0 and ranks.is_first_sharer
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
            if size not in (_ENDED, _FAILED):
                receive = self._begin(size)
            yield batch._replace(is_last=size == _ENDED), num_read
            if size == _FAILED:
                self._ranks.run_together(self._fail)

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
            receive = self._ranks.begin_scatter(None, _FRONT + size)

            def receive_part() -> tuple[int, Batch, int]:
                piece = receive()
                return int(piece[:8].view(torch.int64)), decode(piece[_FRONT:]), 0

            return receive_part
        batch, num_read, messages = self._next
        pieces = torch.empty(self._ranks.world_size, _FRONT + size, dtype=torch.uint8).unbind()
        for piece, message in zip(pieces[self._first_sent :], messages, strict=True):
            message.write(piece[_FRONT:])
        try:
            following = self._prepare()
        except Exception as error:
            self._error = error
            following = _FAILED
        for piece in pieces[self._first_sent :]:
            piece[:8].view(torch.int64).fill_(following)
        finish = self._ranks.begin_scatter(pieces, _FRONT + size)

        def receive_own() -> tuple[int, Batch, int]:
            finish()
            return following, batch, num_read

        return receive_own

    def _fail(self) -> None:
        """Raise the error that reading has met, on the process that reads."""
        if self._error is not None:
            raise self._error
