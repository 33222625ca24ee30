"""Training states in directories and, at URLs, in remote stores, whose code is imported only when there is a URL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pytorch_accel_lite.checkpoint import training_state
from pytorch_accel_lite.checkpoint.remote import RemoteStore, fetch_state, fetched, upload_state
from pytorch_accel_lite.checkpoint.store import StateStore
from pytorch_accel_lite.checkpoint.training_state import CapturedState, TrainingState
from pytorch_accel_lite.distributed import Ranks

if TYPE_CHECKING:
    from pytorch_accel_lite.checkpoint.remote import RemoteStore


def open_store(save_dir: Path | str) -> StateStore | RemoteStore:
    """Return the states in a directory, or at a URL."""
    if isinstance(save_dir, Path):
        return StateStore(save_dir)
    return RemoteStore(save_dir)


def write_state(place: Path | str, ranks: Ranks, snapshot: CapturedState) -> None:
    """Write a training state. All ranks take part, and all raise an error if one fails.

    An existing state there is replaced once the new one is complete.

    :raises OSError: if it cannot be written; an existing state is left unchanged
    """
    if isinstance(place, Path):
        training_state.write_state(place, ranks, snapshot)
        return
    upload_state(place, ranks, snapshot)


def read_state(place: Path | str, ranks: Ranks) -> TrainingState:
    """Verify a state, once in the job or on each machine that fetches it, and read it. All ranks take part."""
    if isinstance(place, Path):
        return training_state.read_state(place, ranks)
    return fetch_state(place, ranks)


@contextmanager
def local_copy(place: Path | str) -> Iterator[Path]:
    """Yield the directory of a state, or that of a copy if it lies in a remote store."""
    if isinstance(place, Path):
        yield place
        return
    with fetched(place) as directory:
        yield directory
