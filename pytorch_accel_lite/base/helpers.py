"""Helpers for users: slices and limits of data, and functions that only some processes run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sized
from functools import wraps
from itertools import islice
from typing import Any, ParamSpec, TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env

from pytorch_accel_lite.base.devices import launched_on_cpus
from pytorch_accel_lite.base.environment import LIMIT_BATCHES_VARIABLE
from pytorch_accel_lite.base.validation import check_positive_int

P = ParamSpec("P")
R = TypeVar("R")


class LimitBatches:
    """Limits trainers created within ``with LimitBatches(n):`` to n batches per process, epoch and evaluation."""

    def __init__(self, num_batches: int) -> None:
        self.num_batches = check_positive_int("num_batches", num_batches)
        self._before: str | None = None

    def __enter__(self) -> LimitBatches:
        self._before = os.environ.get(LIMIT_BATCHES_VARIABLE)
        os.environ[LIMIT_BATCHES_VARIABLE] = str(self.num_batches)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            del os.environ[LIMIT_BATCHES_VARIABLE]
        else:
            os.environ[LIMIT_BATCHES_VARIABLE] = self._before


class DataLoaderSlice:
    """The first ``slice_size`` batches of a dataloader or other iterable, restarted in each iteration."""

    def __init__(self, dl: Iterable[Any], slice_size: int) -> None:
        self.dl = dl
        self.slice_size = check_positive_int("slice_size", slice_size)

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.dl), self.slice_size)

    def __len__(self) -> int:
        """Return ``slice_size``, or the length of the dataloader if that is smaller."""
        return min(self.slice_size, len(self.dl)) if isinstance(self.dl, Sized) else self.slice_size


def current_process() -> PartialState:
    """Return the state of this process, consistent with an ``Accelerator`` that may be created later."""
    return PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU") or launched_on_cpus())


def _only_where(attribute: str, func: Callable[P, R]) -> Callable[P, R | None]:
    @wraps(func)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R | None:
        return func(*args, **kwargs) if getattr(current_process(), attribute) else None

    return wrapper


def local_process_zero_only(func: Callable[P, R]) -> Callable[P, R | None]:
    """Decorate a function to run on only one process of each machine; the others return ``None`` immediately."""
    return _only_where("is_local_main_process", func)


def world_process_zero_only(func: Callable[P, R]) -> Callable[P, R | None]:
    """Decorate a function to run on only one process of the job; the others return ``None`` immediately."""
    return _only_where("is_main_process", func)


def local_process_zero_first(func: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function, such as a download, to run first on one process of each machine. All must call it."""

    @wraps(func)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        state = current_process()
        if not state.is_local_main_process:
            state.wait_for_everyone()
        try:
            return func(*args, **kwargs)
        finally:
            if state.is_local_main_process:
                state.wait_for_everyone()

    return wrapper


def worker_init_fn(worker_id: int) -> int:
    """Return the seed of a dataloader worker, from which all its generators have already been seeded.

    Kept for users of pytorch-accelerated who pass it to a ``DataLoader``; there is nothing left to do.
    """
    return torch.initial_seed()


def remove_padding(padded_tensor: torch.Tensor, pad_value: float) -> torch.Tensor:
    """Return a tensor without the rows in which every element equals ``pad_value``, which may be NaN."""
    is_padding = padded_tensor.isnan() if pad_value != pad_value else padded_tensor == pad_value
    return padded_tensor[~is_padding.flatten(1).all(1) if padded_tensor.ndim > 1 else ~is_padding]
