"""What the first batches and the workers show: single samples, a repeated stream, another order than before."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from zlib import crc32

import torch
from torch.utils.data import DataLoader, IterableDataset

from pytorch_accel_lite.extension_tools.arguments_and_errors import warn_outside
from pytorch_accel_lite.extension_tools.data_and_batches import (
    BatchData,
    Source,
    infer_batch_size,
    is_dense,
    is_single_sample,
    tensors_in,
)


def warn_if_single_sample(item: BatchData) -> None:
    """Warn if an item of a loader of ready batches (``batch_size=None``) is a single sample."""
    if is_single_sample(item):
        warn_outside(
            "A DataLoader with batch_size=None gives each item as it is, and the first looks like a single sample: its "
            f"{infer_batch_size(item)} features would be counted as samples. Pass batch_size=1 or more, which adds the "
            "dimension of the batch, or let each item be a batch, with as many targets as rows."
        )


def comparing_workers(batches: Iterator[BatchData], loader: Source) -> Iterator[BatchData]:
    """Yield batches; warn if the first ones of two workers are the same, which suggests that each reads all samples."""
    first = list(islice(batches, 1))
    yield from first
    second = list(islice(batches, 1))
    rows = [t for t in tensors_in(second) if is_dense(t) and t.ndim]
    varies = any(len(tensor) > 1 and not tensor.eq(tensor[:1]).all() for tensor in rows)
    if varies and _checksum_of_batches(first) == _checksum_of_batches(second):
        warn_outside(
            f"{type(loader.dataset).__name__} gives the same batch to two workers, as if each of the "
            f"num_workers={loader.num_workers} read all samples, which would then be seen as often in an epoch. Let "
            "its __iter__ read the part of its worker (torch.utils.data.get_worker_info()), or pass num_workers=1."
        )
    yield from second
    yield from batches


def identity_of(first: list[BatchData]) -> list[int]:
    """Return the number of rows of an epoch's first batch, and its checksum."""
    return [next(map(len, tensors_in(first)), 0), _checksum_of_batches(first)]


def warn_of_other_batches(source: Source, now: list[int], before: list[int], when: str) -> None:
    """Warn if an epoch begins with another batch than in the interrupted run, unless the batch size has changed.

    Args:
        now: the identity of its first batch
        before: the same in the interrupted run
        when: the epoch, as part of a sentence
    """
    has_batch_size = isinstance(source, DataLoader)  # which the user may have changed
    if now == [*before] or (has_batch_size and now[0] != before[0]):
        return
    dataset = getattr(source, "dataset", source)
    needs_arguments = callable(getattr(dataset, "state_dict", None))
    advice = (
        " Or pass the loader of its library, such as StreamingDataLoader, which has these." if needs_arguments else ""
    )
    warn_outside(
        f"The training data, a {type(dataset).__name__}, give other batches than when the training state was saved "
        f"{when}. An iterable must restart with each iteration and draw its order from torch's, NumPy's or Python's "
        "generators, also those that it holds itself, which are "
        "seeded for it, or from the epoch that set_epoch(epoch) is given; or else have the methods state_dict() and "
        f"load_state_dict(state).{advice}"
    )


def workers_and_batch_size(source: Source) -> list[int] | None:
    """Return the number of workers that read a stream, and the size of their batches; ``None`` for other data."""
    if not isinstance(source, DataLoader) or not isinstance(source.dataset, IterableDataset):
        return None
    return [source.num_workers, source.batch_size or 0]


def warn_of_other_workers(source: Source, before: list[int]) -> bool:
    """Warn, and return whether, a stream that is read again to resume has other workers, or these other batches.

    Args:
        before: the number of workers and the batch size of the interrupted run
    """
    now = workers_and_batch_size(source)
    if now is None or max(now[0], before[0]) < 2 or now == [*before]:
        return False
    (workers, size), (workers_before, size_before) = now, before
    warn_outside(
        f"The stream {type(source.dataset).__name__} was read by num_workers={workers_before} with "
        f"batch_size={size_before} when the training state was saved in the middle of this epoch, and is by "
        f"num_workers={workers} with batch_size={size} now. Workers give batches in turn, so their order differs: some "
        "samples will be seen twice in this epoch and others not at all. Resume with the numbers from before."
    )
    return True


def _checksum_of_batches(batches: list[BatchData]) -> int:
    """Return a nonzero checksum of a few of the values in batches."""
    number = crc32(b"()")  # training states have this checksum, so keep the function as it is
    for tensor in tensors_in(batches):
        if is_dense(tensor):
            few = tensor.detach().resolve_conj().flatten()[:: max(tensor.numel() // 64, 1)]
            number = crc32(few.cpu().contiguous().view(torch.uint8).numpy().tobytes(), number)
    return number or 1
