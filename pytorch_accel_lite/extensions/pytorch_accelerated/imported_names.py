"""Names that programs for pytorch-accelerated import: an error, a function for workers, and a slice of a loader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from itertools import islice

import torch

from pytorch_accel_lite.extension_tools.arguments_and_errors import check_positive_int
from pytorch_accel_lite.extension_tools.plain_types import Tree


class CallbackMethodNotImplementedError(Exception):
    """Never raised: events that a callback does not define are skipped. Kept for code that imports this class."""


def worker_init_fn(worker_id: int) -> int:
    """Return the seed of a dataloader worker, from which all its generators have already been seeded.

    Kept for users who pass it to a ``DataLoader``; it has nothing left to do.
    """
    return torch.initial_seed()


class DataLoaderSlice:
    """The first ``slice_size`` batches of a dataloader or other iterable, restarted in each iteration."""

    def __init__(self, dl: Iterable[Tree], slice_size: int) -> None:
        self.dl = dl
        self.slice_size = check_positive_int("slice_size", slice_size)

    def __iter__(self) -> Iterator[Tree]:
        return islice(iter(self.dl), self.slice_size)

    def __len__(self) -> int:
        """Return ``slice_size``, or the length of the dataloader if that is smaller."""
        return min(self.slice_size, len(self.dl)) if isinstance(self.dl, Sized) else self.slice_size
