"""Reading in step with the other processes: exchanging sample counts, or the batches themselves, a few steps ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

import torch

from pytorch_accel_lite.extension_tools.data_and_batches import Batch, BatchData, infer_batch_size, parts_in, with_last
from pytorch_accel_lite.extension_tools.processes import Message, Ranks, decode
from pytorch_accel_lite.extension_tools.random_numbers import preserving_generators

T = TypeVar("T")

#: Bounds of the number of steps on which the processes agree at once. It starts at one and doubles each time.
_MAX_STEPS = 8
_MIN_STEPS = 2  # one of them is computed while the processes agree
#: Maximum bytes of batches that a process reads ahead, unless the minimum number of steps takes more.
_MAX_BYTES = 2**25


class AgreedStep(NamedTuple, Generic[T]):
    """A step for which at least one process has read an item.

    Args:
        item: the item that this process has read; ``None`` if its source has ended
        number: the number that describes the item; 0 if there is no item
        total: the sum of the numbers of all processes
        without: number of processes that have no item
        is_last: whether no process has an item for another step
    """

    item: T | None
    number: int
    total: int
    without: int
    is_last: bool


@dataclass(eq=False, repr=False)
class _Round(Generic[T]):
    """Steps on which the processes agree at once: the items that this process has read, with a number for each.

    Attributes:
        size: the number of steps
        items: the items that this process has read for these steps
        numbers: the number that describes each item
    """

    size: int
    items: deque[T] = field(default_factory=deque)
    numbers: list[int] = field(default_factory=list)


class Lockstep(Generic[T]):
    """Reads in step with the other processes, and informs them about each item.

    While the agreed steps are computed, the following ones are read gradually.

    Args:
        source: yields an item for each step
        ranks: the processes that read in step
        describe: returns a number for an item
    """

    def __init__(self, source: Iterator[T], ranks: Ranks, describe: Callable[[T], int]) -> None:
        self._source = source
        self._ranks = ranks
        self._describe = describe
        self._error: Exception | None = None

    def __iter__(self) -> Iterator[AgreedStep[T]]:
        """Yield the steps for which at least one process has read an item."""
        following = _Round[T](size=1)
        self._read(following, 1)
        next_reports = self._begin_reporting(following)()
        has_next = self._any_has_read(next_reports, 0)
        while has_next:
            current, reports = following, next_reports
            largest = max(size for _, _, size, *_ in reports)
            limit = max(min(_MAX_BYTES // max(largest, 1), _MAX_STEPS), _MIN_STEPS)
            following = _Round(min(2 * current.size, limit))
            pauses = max(current.size - 1, 1)
            for index in range(current.size):
                if index < pauses:
                    self._read(following, -(-following.size * (index + 1) // pauses))
                if index == pauses - 1:
                    finish = self._begin_reporting(following)
                if index + 1 < current.size:
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

    def _read(self, coming: _Round[T], count: int) -> None:
        """Read the first ``count`` items of a round."""
        try:
            for item in islice(self._source, count - len(coming.items)):
                coming.numbers.append(self._describe(item))
                coming.items.append(item)
        except Exception as error:
            self._error = error
            self._source = iter(())

    def _begin_reporting(self, coming: _Round[T]) -> Callable[[], list[list[int]]]:
        """Start reporting to the other processes what this process has read for a round.

        Returns:
            a function that waits for the reports of all processes: the number of items read, whether reading failed,
            the bytes of an item, and the number for each step
        """
        count = len(coming.items)
        coming.numbers = coming.numbers[:count] + [0] * (coming.size - count)
        size = sum(map(_size_of, parts_in([*coming.items][:1])))
        return self._ranks.begin_gathering([count, self._error is not None, size, *coming.numbers])

    def _any_has_read(self, reports: list[list[int]], index: int) -> bool:
        """Whether any process has read an item for a step.

        Raises:
            Exception: on all processes, if one of them could not read for this step
        """
        if any(has_failed and count == index for count, has_failed, *_ in reports):
            self._ranks.run_together(self._raise_error)
        return any(count > index for count, *_ in reports)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error


def _size_of(part: object) -> int:
    """Return the number of bytes of a part of a batch; for a sparse tensor, the bytes of its dense form."""
    return part.numel() * part.element_size() if isinstance(part, torch.Tensor) else getattr(part, "nbytes", 0)


class _Dealt(NamedTuple):
    """The batches that the first process has read for a step, its own batch, and the messages to the others."""

    group: list[BatchData]
    local: Batch
    messages: list[Message | None]

    @property
    def size(self) -> int:
        """The number of bytes of the largest message."""
        return max((message.size for message in self.messages if message is not None), default=1)


def deal_batches(groups: Iterator[list[BatchData]], ranks: Ranks, fill: bool) -> Iterator[tuple[Batch, int]]:
    """Yield this process's batch of each step, and the number of batches that it has read for the step.

    The first process reads all batches, and sends them to the others while these compute the previous step.

    Args:
        groups: the batches of all processes in each step, which only the first process reads
        fill: whether a process that has no samples left in a step is sent a filler batch
    """
    reads = ranks.rank == 0 and ranks.is_first_sharer
    steps = Lockstep(_prepared(groups, ranks, fill) if reads else iter(()), ranks.everyone, lambda dealt: dealt.size)
    begun = (_begin_receiving(step, ranks) for step in steps)
    return (receive() for receive, _ in with_last(begun))


def _prepared(groups: Iterator[list[BatchData]], ranks: Ranks, fill: bool) -> Iterator[_Dealt]:
    sent_to_first = ranks.replicas > 1  # for the processes that share its batch
    while True:
        # Other processes do not read, so reading must not advance generators that are the same on all processes.
        with preserving_generators() if ranks.replicas > 1 else nullcontext():
            group = next(groups, None)
        if group is None:
            return
        sizes = [infer_batch_size(batch) for batch in group]
        batches = [Batch(batch, size, sum(sizes), is_last=False) for batch, size in zip(group, sizes, strict=True)]
        filler = Batch(group[0] if fill else None, 0, sum(sizes), is_last=False)
        batches += [filler] * (ranks.world_size - len(group))
        messages = [Message(batch) if number or sent_to_first else None for number, batch in enumerate(batches)]
        yield _Dealt(group, batches[0], messages)


def _begin_receiving(step: AgreedStep[_Dealt], ranks: Ranks) -> Callable[[], tuple[Batch, int]]:
    """Start sending and receiving the batches of a step.

    Returns:
        a function that waits for this process's batch, and returns it with the number of batches it has read
    """
    dealt = step.item
    pieces = None
    if dealt is not None:
        pieces = torch.empty(ranks.world_size, step.total, dtype=torch.uint8).unbind()
        for piece, message in zip(pieces, dealt.messages, strict=True):
            if message is not None:
                message.write(piece)
    receive = ranks.begin_scatter(pieces, step.total)

    def finish() -> tuple[Batch, int]:
        piece = receive()
        batch, num_read = (decode(piece), 0) if dealt is None else (dealt.local, len(dealt.group))
        return batch._replace(is_last=step.is_last), num_read

    return finish
