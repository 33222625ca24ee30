"""Discarding batches of an epoch that a run had seen before it was interrupted."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from pytorch_accel_lite.extension_tools.arguments_and_errors import warn_outside
from pytorch_accel_lite.extension_tools.data_and_batches import (
    BatchData,
    early_end_error,
    infer_batch_size,
    slice_batch,
    tensors_in,
)


def skip_batches(batches: Iterator[BatchData], count: int, start: int, is_certain: bool) -> None:
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
