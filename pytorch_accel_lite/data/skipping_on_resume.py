"""Skipping what a run had read of an epoch before it was interrupted: samples, or batches.

An order of indices is not skipped, but divided into steps from the position on: ``global_batches()`` in ``shares.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import TypeVar

from pytorch_accel_lite.base.nested_data import tensors_in
from pytorch_accel_lite.base.user_warnings import warn_outside
from pytorch_accel_lite.data.batch_sizes import infer_batch_size
from pytorch_accel_lite.data.batch_slices import slice_batch
from pytorch_accel_lite.data.shares import WrongLengthError
from pytorch_accel_lite.data.sources import BatchData, Sample

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


def skip_batches(batches: Iterator[Sample], count: int, start: int, is_certain: bool) -> None:
    """Skip the first ``count`` batches; unless ``is_certain``, warn if they cannot have held ``start`` samples.

    A step may count samples along any dimension, such as the second if the first is time.
    """
    shapes = [next((tensor.shape for tensor in tensors_in(batch)), ()) for batch in islice(batches, count)]
    if len(shapes) < count:
        raise early_end_error("data", f"{len(shapes)} batches", count)
    samples = [sum(sizes) for sizes in zip(*shapes, strict=False)]  # empty if a batch has no tensor
    if samples and start not in samples and not is_certain:
        warn_outside(
            f"The resumed run had counted {start} samples in {count} steps of this epoch, but the same number of "
            f"batches now holds {samples[0]}. It resumes at the right place only if it had one process and the same "
            "batches."
        )


def last_samples(batch: BatchData, count: int) -> BatchData:
    """Return the last ``count`` samples of a batch."""
    size = infer_batch_size(batch)
    cause = None
    try:
        rest = slice_batch(batch, size - count, size, size)
        if infer_batch_size(rest) == count:
            return rest
    except ValueError as error:
        cause = error
    raise cannot_split(f"a batch of type {type(batch).__name__}") from cause


def cannot_split(what: str) -> ValueError:
    """Return the error for a position in the middle of data that cannot be split."""
    return ValueError(
        f"The resumed run was saved at a sample that is now in the middle of {what}, which cannot be split. Resume it "
        "with its original batch size and number of processes."
    )


def early_end_error(source: str, seen: str, done: int) -> WrongLengthError:
    """Return the error for data that end before the position from which a run resumes."""
    return WrongLengthError(
        f"The {source} ended after {seen} of this epoch, but the resumed run had already seen {done}. Resume it with "
        "the data it was saved with."
    )
