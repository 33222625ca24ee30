"""Where training states and models are kept: a directory, or the store of a URL, which an extension adds."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Protocol

from pytorch_accel_lite.base.missing_extensions import missing_extension_text
from pytorch_accel_lite.checkpoint.states.state_files import CapturedState, read_directory, write_directory
from pytorch_accel_lite.checkpoint.states.state_store import DirectoryStore, StateStore
from pytorch_accel_lite.distributed import Ranks
from pytorch_accel_lite.run.training_state import TrainingState


class Store(Protocol):
    """Keeps states and models at URLs of one scheme. All ranks take part in the methods with the argument ``ranks``."""

    def states(self, url: str) -> StateStore:
        """Return the store of a run's states, which are below a URL."""

    def write_state(self, url: str, ranks: Ranks, captured: CapturedState) -> None:
        """Write a training state, of which each rank has captured its part; see ``extending.write_files``.

        An existing state there is replaced once the new one is complete.

        Raises:
            OSError: on all ranks, if one fails; an existing state is left unchanged
        """

    def read_state(self, url: str, ranks: Ranks) -> TrainingState:
        """Verify a state and read it, with the weights; see ``extending.read_verified``.

        Raises:
            FileNotFoundError: if there is no state
            DamagedStateError: on all ranks, if it is damaged; names the file
            OSError: if the store cannot be reached
        """

    def fetch_state(self, url: str) -> AbstractContextManager[Path]:
        """Return a context of a directory with a verified copy of a state."""

    def fetch_weights(self, url: str) -> AbstractContextManager[Path]:
        """Return a context of a directory with copies of the safetensors files at a URL, or of the file named by it.

        Raises:
            FileNotFoundError: if there are no such files
        """

    def collect(self, url: str) -> AbstractContextManager[Path]:
        """Return a context of a directory. At its end, the files are written to a URL, the model card last.

        At first, the directory has the card that is at the URL, if any. The card is written again only if it has
        changed.
        """


#: The stores by URL scheme, such as ``"s3"``, with ``"*"`` for all others. An extension adds its own.
STORES: dict[str, Store] = {}


def store_of(url: str) -> Store:
    """Return the store for a URL.

    Raises:
        ValueError: if there is no store for it
    """
    scheme = url.partition("://")[0]
    store = STORES.get(scheme, STORES.get("*"))
    if store is None:
        raise ValueError(f"The store of {url!r} {missing_extension_text('remote')}")
    return store


def open_store(save_dir: Path | str) -> StateStore:
    """Return the store of the states in a directory, or at a URL."""
    return DirectoryStore(save_dir) if isinstance(save_dir, Path) else store_of(save_dir).states(save_dir)


def write_state(location: Path | str, ranks: Ranks, captured: CapturedState) -> None:
    """Write a training state. All ranks take part, and all raise an error if one fails.

    An existing state there is replaced once the new one is complete.

    Raises:
        OSError: if the state cannot be written; an existing state is left unchanged
    """
    if isinstance(location, Path):
        write_directory(location, ranks, captured)
    else:
        store_of(location).write_state(location, ranks, captured)


def read_state(location: Path | str, ranks: Ranks) -> TrainingState:
    """Verify a state, once in the job or once on each machine that fetches it, and read it. All ranks take part.

    Raises:
        FileNotFoundError: if there is no state
        DamagedStateError: on all ranks, if it is damaged; names the file
        OSError: if the store cannot be reached
    """
    if isinstance(location, Path):
        return read_directory(location, ranks)
    return store_of(location).read_state(location, ranks)


def open_folder(location: Path | str) -> AbstractContextManager[Path]:
    """Return a context of a directory for a model: at a path, or a temporary directory that is uploaded to a URL."""
    return nullcontext(location) if isinstance(location, Path) else store_of(location).collect(location)
