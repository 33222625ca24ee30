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
    :param describe: returns a number for an item; not 0 if the numbers are to be equal
    :param unequal: the error to raise if the numbers for a step differ; ``None`` if they are to be added up
    :param steps: number of steps
    :ivar items: what was read, to be taken from the left in turn; fewer items than steps if the source has ended
    :ivar numbers: a number for each step; 0 if there is no item
    :ivar totals: the sums of the numbers of all processes
    :ivar without: number of processes that have read nothing
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
        self._is_known = False
        self.steps = steps
        self.items: deque[T] = deque()
        self.numbers: list[int] = []

    def read(self, count: int) -> None:
        """Read the first ``count`` items; after the last, begin to tell the other processes."""
        try:
            for item in islice(self._source, count - len(self.items)):
                self.numbers.append(self._describe(item))
                self.items.append(item)
        except Exception as error:
            self._error = error
            self._source = iter(())
        if count == self.steps:
            held = len(self.items)
            self.numbers = self.numbers[:held] + [0] * (self.steps - held)
            size = sum(map(_size_of, parts_in([*self.items][:1])))
            self._finish = self._ranks.begin_gathering([held, self._error is not None, size, *self.numbers])

    def has_items(self, place: int) -> bool:
        """Whether any process has read something for a step.

        :raises Exception: on all processes, if one of them could not read for this step, or if the numbers differ
        """
        if not self._is_known:
            held, failed, sizes, *numbers = zip(*self._finish(), strict=True)
            self.totals = [sum(of_all) for of_all in numbers]
            self.without = held.count(0)
            self._most_held: int = max(held)
            self._failing = {place for place, has_failed in zip(held, failed, strict=True) if has_failed}
            self._differing = {step for step, of_all in enumerate(numbers) if len(set(of_all)) > 1}
            self._largest = max(sizes)
            self._is_known = True
        if place in self._failing:
            self._ranks.run_together(self._fail)
        if self._unequal is not None and place in self._differing:
            raise self._unequal
        return place < self._most_held

    def following(self) -> Announced[T]:
        """Return the next steps, of which nothing has been read yet; the processes must know about these."""
        most = min(_MOST_BYTES // max(self._largest, 1), _MOST_STEPS)
        steps = min(2 * self.steps, max(most, _LEAST_STEPS))
        return Announced(self._source, self._ranks, self._describe, self._unequal, steps)

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
