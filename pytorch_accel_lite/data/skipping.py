"""Finding the position in an epoch at which a run resumes, in data that are read in turn."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, TypeVar

from pytorch_accel_lite.base.batches import find_batch_size, tensors_in
from pytorch_accel_lite.base.splitting import slice_batch
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


def cannot_split(what: str) -> ValueError:
    """Return the error for a position in the middle of data that cannot be split."""
    return ValueError(
        f"The resumed run was saved at a sample that is now in the middle of {what}, which cannot be split. Resume it "
        "with its original batch size and number of processes."
    )


def last_samples(batch: Any, count: int) -> Any:
    """Return the last ``count`` samples of a batch."""
    size = find_batch_size(batch)
    try:
        rest = slice_batch(batch, size - count, size, size)
    except ValueError as error:
        raise cannot_split(f"a batch of type {type(batch).__name__}") from error
    if find_batch_size(rest) != count:
        raise cannot_split(f"a batch of type {type(batch).__name__}")
    return rest


def skip_batches(batches: Iterator[Any], count: int, start: int, is_certain: bool) -> None:
    """Skip the first ``count`` batches; unless ``is_certain``, warn if they cannot have held ``start`` samples.

    A step may count them along any dimension: the second if the first is time.
    """
    shapes = [next((tensor.shape for tensor in tensors_in(batch)), ()) for batch in islice(batches, count)]
    if len(shapes) < count:
        raise ended("data", f"{len(shapes)} batches", count)
    samples = [sum(sizes) for sizes in zip(*shapes, strict=False)]  # none if a batch has no tensor
    if samples and start not in samples and not is_certain:
        warnings.warn(
            f"The resumed run had counted {start} samples in {count} steps of this epoch, but the same number of "
            f"batches now holds {samples[0]}. It resumes at the right place only if it had one process and the same "
            "batches.",
            stacklevel=2,
        )
