"""Training states in a remote store, such as S3, through fsspec: the machines of a job need no shared disk.

Each rank writes its files to a temporary directory of its machine and uploads them. The manifest is uploaded last, as a
single object, and makes the state complete. The files of each save lie in a folder of their own, which the manifest
names, so a state is replaced in one step as well. To be read, a state is fetched once per machine and verified there.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from accelerate import PartialState

from pytorch_accel_lite.base.environment import import_extra
from pytorch_accel_lite.checkpoint.store import STATE_NAME, refuse_damaged, state_name
from pytorch_accel_lite.checkpoint.training_state import (
    MANIFEST,
    CapturedState,
    DamagedStateError,
    TrainingState,
    manifest_text,
    read_manifest,
    read_tensors,
    read_verified,
    verify_state,
    write_files,
)
from pytorch_accel_lite.distributed import Ranks

#: Says which run saves here. The newest run takes over: a lock would outlive a run whose machine has died.
_OWNER = ".owner.json"
#: Names the complete states, as a store may be late to list what was written.
_INDEX = ".states.json"
_LOCAL = "training-state-"
_SECONDS_UNTIL_LOCKED = 60  # far more than a process needs to lock what it has created


class RemoteFolder:
    """A folder in a remote store. Its errors are ``OSError`` and name the address.

    :param url: such as ``s3://bucket/run``
    :raises ImportError: if the package for this kind of store is not installed; says how to install it
    :raises ValueError: if there is no such kind of store
    """

    def __init__(self, url: str) -> None:
        self.url = url
        import_extra("fsspec", "s3", f"The address {url!r}")
        from fsspec.core import url_to_fs

        try:
            self._store, self._path = url_to_fs(url)
        except ImportError as error:
            if url.startswith(("s3:", "s3a:")):
                import_extra("s3fs", "s3", f"The address {url!r}")
            raise ImportError(f"{url!r} needs a further package. {error}") from error
        except ValueError as error:
            raise ValueError(f"{url!r} is not the address of a store that fsspec knows: {error}") from error
        self._created: set[PurePosixPath] = set()

    @contextmanager
    def _explaining(self, name: str = "") -> Iterator[str]:
        """Yield the path of an object; errors say where and why."""
        try:
            yield f"{self._path}/{name}".rstrip("/")
        except FileNotFoundError as error:
            raise FileNotFoundError(f"There is no {self.url}/{name}: {error}") from error
        except Exception as error:  # each kind of store has errors of its own
            raise OSError(
                f"{self.url}/{name} cannot be reached: {type(error).__name__}: {error}. Check the address, and the "
                "credentials in the environment or in fsspec's configuration."
            ) from error

    def read(self, name: str) -> bytes:
        """Return the content of an object.

        :raises FileNotFoundError: if it does not exist
        """
        with self._explaining(name) as path:
            content: bytes = self._store.cat_file(path)
            return content

    def fetch(self, name: str, file: Path) -> None:
        """Copy an object to a file."""
        with self._explaining(name) as path:
            self._store.get_file(path, os.fspath(file))

    def write(self, name: str, content: bytes) -> None:
        """Write an object, or replace it."""
        with self._explaining(name) as path:
            self._create_parent(path)
            self._store.pipe_file(path, content)

    def upload(self, file: Path, name: str) -> None:
        """Copy a file to an object."""
        with self._explaining(name) as path:
            self._create_parent(path)
            self._store.put_file(os.fspath(file), path)
            self._store.invalidate_cache()
            there, here = self._store.info(path)["size"], file.stat().st_size
            if there != here:
                raise OSError(f"{there} of {here} bytes have arrived")

    def _create_parent(self, path: str) -> None:
        """Create the folders of a path in stores that have folders; a bucket that does not exist is an error."""
        own = PurePosixPath(self._path)
        within = [folder for folder in PurePosixPath(path).parents if own in folder.parents]
        for folder in (own, *reversed(within)):
            if folder not in self._created:
                with suppress(FileExistsError):
                    self._store.mkdir(str(folder), create_parents=False)
                self._created.add(folder)

    def names(self) -> list[str]:
        """Return the names of what the folder contains; none if it does not exist."""
        with self._explaining() as path:
            self._store.invalidate_cache()
            try:
                found = self._store.ls(path, detail=False)
            except FileNotFoundError:
                return []
            return sorted({PurePosixPath(entry).name for entry in found})

    def remove(self, name: str) -> None:
        """Remove an object, or a folder with everything in it, if it exists."""
        with self._explaining(name) as path, suppress(FileNotFoundError):
            self._store.rm(path, recursive=True)


@contextmanager
def _local_directory() -> Iterator[str]:
    """Yield an empty temporary directory; those that killed processes have left on this machine are removed.

    A process has a lock on its own, which ends with it.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{_LOCAL}*"):
        with suppress(OSError), _opened(left) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - left.stat().st_mtime > _SECONDS_UNTIL_LOCKED:
                shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=_LOCAL) as directory, _opened(Path(directory)) as descriptor:
        with suppress(OSError):  # no locks there, so nothing is removed, either
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield directory


@contextmanager
def _opened(directory: Path) -> Iterator[int]:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def upload_state(url: str, ranks: Ranks, snapshot: CapturedState) -> None:
    """Upload a training state. All ranks take part, and all raise an error if one fails.

    :raises OSError: if it cannot be written; an existing state is left unchanged
    """
    folder = RemoteFolder(url)
    files_of_this_save = ranks.broadcast_object(lambda: f"files-{secrets.token_hex(4)}")

    def upload() -> dict[str, dict[str, Any]]:
        with _local_directory() as staging:
            entries = write_files(Path(staging), ranks.rank, snapshot)
            for name in entries:
                folder.upload(Path(staging, name), f"{files_of_this_save}/{name}")
        return entries

    try:
        files = ranks.run_together(upload)
        text = manifest_text(files, {**snapshot.metadata, "folder": files_of_this_save})
        ranks.run_together(lambda: folder.write(MANIFEST, text.encode()), only_first=True)
    except BaseException:
        if ranks.rank == 0:
            with suppress(OSError):
                folder.remove(files_of_this_save)
        raise
    if ranks.rank == 0:
        _remove_others(folder, files_of_this_save)


def _remove_others(folder: RemoteFolder, files: str) -> None:
    """Remove what earlier or interrupted saves of a state have left."""
    with suppress(OSError):
        for name in folder.names():
            if name not in (MANIFEST, files):
                folder.remove(name)


def fetch_state(url: str, ranks: Ranks, is_listed: bool = False) -> TrainingState:
    """Fetch a state to each machine, verify it there and read it, including the weights. All ranks take part.

    :param is_listed: whether it was complete at some time: a missing manifest is damage then
    :raises FileNotFoundError: if there is no state
    :raises DamagedStateError: on all ranks, if it is damaged; names the file
    :raises OSError: if the store cannot be reached
    """
    with _local_directory() as directory:

        def fetch() -> tuple[str, dict[str, Any], str | None] | None:
            if not PartialState().is_local_main_process:
                return None
            try:
                return directory, _copy(RemoteFolder(url), Path(directory)), None
            except DamagedStateError as error:
                return directory, {}, str(error).replace(directory, url)
            except FileNotFoundError:
                if not is_listed:
                    raise
                return directory, {}, f"'{url}/{MANIFEST}' is missing."

        outcomes = ranks.run_together(fetch)  # nothing is raised for damage, so that all ranks raise the same
        for outcome in outcomes:
            if outcome is not None and outcome[2] is not None:
                raise DamagedStateError(outcome[2])
        # The first process of this machine is the last one before this that has fetched the state.
        here, metadata, _ = [outcome for outcome in outcomes[: ranks.rank + 1] if outcome is not None][-1]
        found: list[TrainingState] = []

        def read() -> None:
            state = read_verified(Path(here), metadata, ranks)
            tensors = read_tensors(Path(here))  # in a mapped file, which outlives its name
            found.append(TrainingState(url, metadata, state.shared, state.own, tensors, state.pieces))

        ranks.run_together(read)
        return found[0]


def _copy(folder: RemoteFolder, directory: Path) -> dict[str, Any]:
    """Copy a state to an empty directory, and return its manifest once every byte of it is verified."""
    try:
        (directory / MANIFEST).write_bytes(folder.read(MANIFEST))
    except FileNotFoundError as error:
        raise FileNotFoundError(f"There is no training state at {folder.url!r}.") from error
    manifest = read_manifest(directory)
    for name in manifest["files"]:
        if PurePosixPath(name).name != name:
            raise DamagedStateError(f"The manifest of {folder.url!r} lists {name!r}, which is not the name of a file.")
        with suppress(FileNotFoundError):  # which verification reports
            folder.fetch(f"{manifest['folder']}/{name}", directory / name)
    return verify_state(directory)


@contextmanager
def fetched(url: str) -> Iterator[Path]:
    """Yield the directory of a verified copy of a state, which is removed afterwards."""
    with _local_directory() as directory:
        _copy(RemoteFolder(url), Path(directory))
        yield Path(directory)


class RemoteStore:
    """The states of a run at a URL. Other objects there are left alone."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._connected: RemoteFolder | None = None
        self._owner: dict[str, Any] | None = None

    @property
    def _folder(self) -> RemoteFolder:
        if self._connected is None:
            self._connected = RemoteFolder(self.url)
        return self._connected

    def path_for(self, update: int) -> str:
        """Return the URL of the state after an update."""
        return f"{self.url}/{state_name(update)}"

    def lock(self) -> None:
        """Claim the URL until :meth:`unlock`, or until another run claims it, and remove remains of killed runs.

        :raises OSError: if it cannot be written
        """
        if self._owner is not None:
            return
        owner = {"token": secrets.token_hex(8), "host": socket.gethostname(), "process": os.getpid()}
        self._folder.write(_OWNER, json.dumps(owner).encode())
        self._owner = owner
        complete = self._complete()
        for name in self._names():
            if name not in complete:
                self._folder.remove(name)

    def unlock(self) -> None:
        """Give up the claim, unless another run has taken over."""
        owner, self._owner = self._owner, None
        if owner is not None:
            with suppress(OSError):
                if self._read_json(_OWNER) == owner:
                    self._folder.remove(_OWNER)

    def check_lock(self, ranks: Ranks) -> None:
        """Check, on all ranks, that no other run has taken over.

        :raises RuntimeError: if one has; names its machine and process
        """
        ranks.run_together(self._check_owner, only_first=True)

    def _check_owner(self) -> None:
        newest = self._read_json(_OWNER)
        if newest and newest != self._owner:
            raise RuntimeError(
                f"Another run (process {newest['process']} on {newest['host']}) has started to save its training "
                f"states in {self.url!r}, so this one ends. Give each run a save_dir of its own."
            )

    def read_latest(self, ranks: Ranks, report: Callable[[str], object]) -> TrainingState | None:
        """Return the newest intact state, or ``None`` if there is none. All ranks take part.

        :param report: called with a message for each damaged state that is skipped
        :raises DamagedStateError: if there are states, but all are damaged
        """
        problems = []
        for name in ranks.broadcast_object(self._newest_first):
            try:
                return fetch_state(f"{self.url}/{name}", ranks, is_listed=True)
            except DamagedStateError as error:
                problems.append(str(error))
                report(f"Skipping a damaged training state. {error}")
        refuse_damaged(self.url, problems)
        return None

    def has_states(self) -> bool:
        """Whether there are any complete states."""
        return bool(self._complete())

    def newest_time(self) -> float:
        """Return when the newest state was saved, by the clock of the machine that did so; 0 if there is none."""
        manifests = [self._manifest(name) or {} for name in self._complete()]
        return max((float(manifest.get("saved_at", 0.0)) for manifest in manifests), default=0.0)

    def rotate(self, keep: int | None, protected: set[str]) -> None:
        """Remove all but the newest ``keep`` states, sparing those with protected names; ``None`` keeps all."""
        names = self._complete()
        removed = [] if keep is None else [name for name in self._newest_first()[keep:] if name not in protected]
        left = [name for name in names if name not in removed]
        self._folder.write(_INDEX, json.dumps({"states": left}).encode())
        for name in removed:
            self._folder.remove(f"{name}/{MANIFEST}")  # stops being a state at once, however long removal takes
            self._folder.remove(name)

    def _newest_first(self) -> list[str]:
        # Those with damaged manifests come first, to be reported.
        saved_at = {name: float((self._manifest(name) or {}).get("saved_at", math.inf)) for name in self._complete()}
        return sorted(saved_at, key=lambda name: (saved_at[name], name), reverse=True)

    def _complete(self) -> list[str]:
        """Return the names of the states that were complete at some time."""
        index = self._index()
        return [name for name in self._names() if name in index or self._manifest(name) is not None]

    def _names(self) -> list[str]:
        """Return the names of all states, complete or not, including those that the store does not list yet."""
        return sorted(name for name in {*self._folder.names(), *self._index()} if STATE_NAME.fullmatch(name))

    def _index(self) -> list[str]:
        names: list[str] = (self._read_json(_INDEX) or {}).get("states", [])
        return names

    def _manifest(self, name: str) -> dict[str, Any] | None:
        return self._read_json(f"{name}/{MANIFEST}")

    def _read_json(self, name: str) -> dict[str, Any] | None:
        """Return the content of an object: empty if it is damaged, ``None`` if it does not exist."""
        try:
            content = json.loads(self._folder.read(name))
        except FileNotFoundError:
            return None
        except ValueError:
            return {}
        return content if isinstance(content, dict) else {}
