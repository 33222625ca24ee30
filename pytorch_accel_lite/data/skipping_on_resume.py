"""Skipping what a run had read of an epoch before it was interrupted.

An order of indices is not skipped, but divided into steps from the position on: ``global_batches()`` in ``shares.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import TypeVar

from pytorch_accel_lite.data.shares import WrongLengthError

T = TypeVar("T")


def skip_samples(
    batches: Iterator[T], start: int, size_of: Callable[[T], int], rest_of: Callable[[T, int], T], source: str = "data"
) -> Iterator[T]:
    """Skip ``start`` samples and return what follows them.

    Args:
        rest_of: returns the last samples of a batch in the middle of which the skipped samples end
    """
    position = 0
    while position < start:
        batch = next(batches, None)
        if batch is None:
            raise early_end_error(source, f"{position} samples", start)
        position += size_of(batch)
        if position > start:
            return chain([rest_of(batch, position - start)], batches)
    return batches


def early_end_error(source: str, seen: str, done: int) -> WrongLengthError:
    """Return the error for data that end before the position from which a run resumes."""
    return WrongLengthError(
        f"The {source} ended after {seen} of this epoch, but the resumed run had already seen {done}. Resume it with "
        "the data it was saved with."
    )
