"""Finding the position in an epoch at which a run resumes, in data that are read in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from pytorch_accel_lite.data.plan import WrongLengthError

T = TypeVar("T")


def ended(source: str, given: str, done: int) -> WrongLengthError:
    """Return the error for data that end before the position at which a run resumes."""
    return WrongLengthError(
        f"The {source} ended after {given} of this epoch, but the resumed run had already seen {done}. Resume it with "
        "the data it was saved with."
    )


def skip_samples(
    batches: Iterator[T], start: int, size_of: Callable[[T], int], source: str = "data"
) -> tuple[T, int] | None:
    """Skip ``start`` samples; if they end in the middle of a batch, return it and the number of its samples left."""
    position = 0
    while position < start:
        batch = next(batches, None)
        if batch is None:
            raise ended(source, f"{position} samples", start)
        position += size_of(batch)
        if position > start:
            return batch, position - start
    return None
