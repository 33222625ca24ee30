"""Limiting recurring actions to a share of the time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class TimeBudget:
    """Limits a recurring action, such as drawing a plot after each epoch, to a share of the time.

    Args:
        share: maximum share of the time, from 0 to 1
        expected: approximate duration of the first action, in seconds
    """

    def __init__(self, share: float, expected: float) -> None:
        self._share = share
        self._next = time.monotonic() + expected / share

    @property
    def is_due(self) -> bool:
        """Whether the action may be done now."""
        return time.monotonic() >= self._next

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure the action, a block. The longer it takes, the later it is due again."""
        begin = time.monotonic()
        yield
        self._next = begin + (time.monotonic() - begin) / self._share
