"""Agreeing with the other processes on what all read: for several steps at once, while an earlier one is computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Generic, TypeVar

import torch

from pytorch_accel_lite.base.batches import parts_in
from pytorch_accel_lite.distributed import Ranks

T = TypeVar("T")

#: Steps about which the processes agree at once: at first one, then twice as many each time, up to these bounds.
_MOST_STEPS = 8
_LEAST_STEPS = 2  # of which one is computed while the processes agree
#: Bytes of batches that a process reads ahead for that, if they are more than those of the fewest steps.
_MOST_BYTES = 2**25


class Announced(Generic[T]):
    """What this process reads for some steps, described to the others.

    :param source: what is read in each step
    :param steps: number of steps
    :param describe: returns a number for an item; not 0 if the numbers are to be equal
    :param unequal: the error to raise if the numbers for a step differ; ``None`` if they are to be added up
    :ivar items: what was read, to be taken from the left in turn; fewer items than steps if the source has ended
    :ivar numbers: a number for each step; 0 if there is no item
    """

    def __init__(
        self,
        source: Iterator[T],
        ranks: Ranks,
        describe: Callable[[T], int],
        unequal: ValueError | None = None,
        steps: int = 1,
    ) -> None:
        self._source = source
        self._ranks = ranks
        self._describe = describe
        self._unequal = unequal
        self._error: Exception | None = None
        self._has_ended = False
        self._known: list[int] = []
        self.steps = steps
        self.items: deque[T] = deque()
        self.numbers = [0] * steps

    def read(self, count: int) -> None:
        """Read the first ``count`` items; after the last, begin to tell the other processes."""
        missing = 0 if self._has_ended else count - len(self.items)
        try:
            for item in islice(self._source, missing):
                self.numbers[len(self.items)] = self._describe(item)
                self.items.append(item)
        except Exception as error:
            self._error = error
        self._has_ended = len(self.items) < count
        if count == self.steps:
            self._announce()

    def _announce(self) -> None:
        failed = [False] * self.steps
        if self._error is not None:
            failed[len(self.items)] = True
        held = len(self.items)
        # The sums of the former tell whether anyone has an item, and so do the maxima of the latter.
        others = [place < held for place in range(self.steps)] if self._unequal is None else [-n for n in self.numbers]
        size = sum(map(_size_of, parts_in([*self.items][:1])))
        begin = self._ranks.begin_sum if self._unequal is None else self._ranks.begin_max
        self._finish = begin([*self.numbers, *others, *failed, not self.items, size])

    def total(self, place: int) -> int:
        """Return the sum of the numbers of all processes for a step, or the number that all have.

        :raises Exception: on all processes, if one of them could not read for this step, or if the numbers differ
        """
        self._known = self._known or [int(value) for value in self._finish()]
        if self._known[2 * self.steps + place]:
            self._ranks.run_together(self._fail)
        total = self._known[place]
        if self._unequal is not None and total != -self._known[self.steps + place]:
            raise self._unequal
        return total

    def has_items(self, place: int) -> bool:
        """Whether any process has read something for a step; raises what :meth:`total` does."""
        self.total(place)
        return bool(self._known[self.steps + place])

    @property
    def without(self) -> int:
        """Number of processes that have read nothing."""
        return self._known[-2]

    def following(self) -> Announced[T]:
        """Return the next steps, of which nothing has been read yet; the processes must know about these."""
        added = self._ranks.world_size if self._unequal is None else 1
        most = _MOST_BYTES * added // max(self._known[-1], 1)
        steps = min(2 * self.steps, max(min(most, _MOST_STEPS), _LEAST_STEPS))
        following = Announced(self._source, self._ranks, self._describe, self._unequal, steps)
        following._has_ended = self._has_ended
        return following

    def _fail(self) -> None:
        if self._error is not None:
            raise self._error


def _size_of(part: Any) -> int:
    """Return the number of bytes of a part of a batch; for a sparse tensor, which has fewer, those of a dense one."""
    return part.numel() * part.element_size() if isinstance(part, torch.Tensor) else getattr(part, "nbytes", 0)


def agreed_steps(first: Announced[T]) -> Iterator[tuple[Announced[T], int, bool]]:
    """Yield the steps for which any process has read something: where to find each, its place there, if it is the last.

    While the steps that the processes know about are computed, those that follow are read little by little.

    :param first: the first step
    """
    known = first
    known.read(1)
    while known.has_items(0):
        following = known.following()
        shares = max(known.steps - 1, 1)
        for place in range(known.steps):
            if place < shares:
                following.read(-(-following.steps * (place + 1) // shares))
            has_next = known.has_items(place + 1) if place + 1 < known.steps else following.has_items(0)
            yield known, place, not has_next
            if not has_next:
                return
        known = following
