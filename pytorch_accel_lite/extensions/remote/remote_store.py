"""Training states and models in a remote store, such as S3, through fsspec, so that machines need no shared disk.

Each rank writes its files to a temporary directory of its machine and uploads them. The manifest is uploaded last, as a
single object, and makes the state complete. The files of each save are in a separate folder, which the manifest names,
so a state is replaced in one step as well. To be read, a state is fetched once per machine and verified there.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path, PurePosixPath

from accelerate import PartialState

from pytorch_accel_lite.checkpoint import DamagedStateError, verify_state
from pytorch_accel_lite.extending import (
    CapturedState,
    JsonObject,
    Ranks,
    StateStore,
    Store,
    TrainingState,
    catch_damage,
    manifest_text,
    read_manifest,
    read_model,
    read_verified,
    write_files,
)
from pytorch_accel_lite.utils import import_extra

MANIFEST, CARD, WEIGHTS = "manifest.json", "README.md", "model.safetensors"
_OWNER = ".owner.json"  # this object names the run that saves here
_PREFIX = "pytorch_accel_lite-state-"  # only folders with this prefix are ever removed
_SECONDS_UNTIL_REMOVED = 24 * 60 * 60  # far more than an upload takes


class RemoteFolder:
    """A folder in a remote store. It raises ``OSError``, with the address in the message.

    Args:
        url: the address, such as ``s3://bucket/run``
        argument: name of the argument that has the URL, for the error

    Raises:
        ImportError: if the package for this kind of store is not installed
        ValueError: if fsspec does not know this kind of store
    """

    def __init__(self, url: str, argument: str = "The address") -> None:
        self.url = url
        import_extra("fsspec", "s3", f"The address {url!r}")
        from fsspec.core import url_to_fs

        try:
            self._store, self._path = url_to_fs(url)
        except ValueError as error:
            raise ValueError(
                f"{argument}={url!r} names no store that fsspec knows ({error}). Pass a path, or a URL that begins as "
                "s3://, gs:// or hf:// do."
            ) from error
        self._created: set[PurePosixPath] = set()

    @contextmanager
    def _accessing(self, name: str = "", writes: bool = False) -> Iterator[str]:
        """Yield the path of an object, with no cache. Errors in the block name the address and the reason."""
        try:
            self._store.invalidate_cache()
            yield f"{self._path}/{name}".rstrip("/")
        except FileNotFoundError as error:
            problem = f"{self.url}/{name} cannot be written" if writes else f"There is no {self.url}/{name}"
            raise FileNotFoundError(f"{problem}: {error}") from error
        except Exception as error:  # each kind of store has its own errors
            raise OSError(
                f"{self.url}/{name} cannot be reached: {type(error).__name__}: {error}. Check the address, and the "
                "credentials in the environment or in fsspec's configuration."
            ) from error

    def read(self, name: str) -> bytes:
        """Return the content of an object.

        Raises:
            FileNotFoundError: if it does not exist
        """
        with self._accessing(name) as path:
            content: bytes = self._store.cat_file(path)
            return content

    def fetch(self, name: str, file: Path) -> None:
        """Copy an object to a file."""
        with self._accessing(name) as path:
            self._store.get_file(path, os.fspath(file))

    def write(self, name: str, content: bytes) -> None:
        """Write an object, or replace it."""
        with self._accessing(name, writes=True) as path:
            self._create_parent(path)
            self._store.pipe_file(path, content)

    def upload(self, file: Path, name: str) -> None:
        """Copy a file to an object."""
        with self._accessing(name, writes=True) as path:
            self._create_parent(path)
            self._store.put_file(os.fspath(file), path)
            self._store.invalidate_cache()
            remote_size, local_size = self._store.info(path)["size"], file.stat().st_size
            if remote_size != local_size:
                raise OSError(f"{remote_size} of {local_size} bytes have arrived")

    def _create_parent(self, path: str) -> None:
        """Create the parent folders of a path in stores that have folders. A missing bucket is an error."""
        root = PurePosixPath(self._path)
        subfolders = [folder for folder in PurePosixPath(path).parents if root in folder.parents]
        for folder in (root, *reversed(subfolders)):
            if folder not in self._created:
                with suppress(FileExistsError):
                    self._store.mkdir(str(folder), create_parents=False)
                self._created.add(folder)

    def names(self) -> list[str]:
        """Return the names of the objects and folders in this folder; an empty list if it does not exist."""
        with self._accessing() as path:
            try:
                entries = self._store.ls(path, detail=False)
            except FileNotFoundError:
                return []
            return sorted({PurePosixPath(entry).name for entry in entries})

    def remove(self, name: str) -> None:
        """Remove an object, or a folder with everything in it, if it exists."""
        with self._accessing(name) as path, suppress(FileNotFoundError):
            self._store.rm(path, recursive=True)


@contextmanager
def _temporary_directory() -> Iterator[Path]:
    """Yield an empty directory for the files of a state, and remove old directories of killed processes before."""
    for leftover in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if time.time() - leftover.stat().st_mtime > _SECONDS_UNTIL_REMOVED:
                shutil.rmtree(leftover)
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as directory:
        yield Path(directory)


def _download_verified(url: str, directory: Path) -> JsonObject:
    """Copy a state to an empty directory, verify every byte, and return its manifest."""
    folder = RemoteFolder(url)
    try:
        (directory / MANIFEST).write_bytes(folder.read(MANIFEST))
    except FileNotFoundError as error:
        raise FileNotFoundError(f"There is no training state at {url!r}.") from error
    try:
        manifest = read_manifest(directory)
        for name in manifest["files"]:
            with suppress(FileNotFoundError):  # verification reports missing files
                folder.fetch(f"{manifest['folder']}/{name}", directory / name)
        return verify_state(directory)
    except DamagedStateError as error:
        raise DamagedStateError(str(error).replace(os.fspath(directory), url)) from None


class RemoteStates(StateStore):
    """The states of a run at a URL. The newest run takes over: a lock would outlive a run whose machine has died."""

    location: str

    def __init__(self, url: str) -> None:
        self.location = url
        self._owner: JsonObject | None = None
        self._incomplete: list[str] = []  # states that were incomplete when the URL was claimed
        self._has_saved = False

    @cached_property
    def _folder(self) -> RemoteFolder:
        return RemoteFolder(self.location, "save_dir")

    def _path(self, name: str) -> str:
        return f"{self.location}/{name}"

    def names(self) -> list[str]:
        """Return the names of the states that are complete."""
        return [name for name in self._all_names() if self._manifest(name) is not None]

    def _all_names(self) -> list[str]:
        """Return the names of all states, complete or not."""
        return [name for name in self._folder.names() if self.NAME.fullmatch(name)]

    def saved_at(self, name: str) -> float:
        """Return when a state was saved; the current time if unknown, so that a damaged state counts as the newest."""
        saved_at = (self._manifest(name) or {}).get("saved_at")
        return float(saved_at) if isinstance(saved_at, (int, float)) else time.time()

    def read(self, name: str, ranks: Ranks) -> TrainingState:
        """Verify and read a state. All ranks take part."""
        return RemoteStore().read_state(self._path(name), ranks)

    def remove(self, name: str) -> None:
        """Remove a state, its manifest first."""
        self._folder.remove(f"{name}/{MANIFEST}")
        self._folder.remove(name)

    def lock(self) -> bool:
        """Claim the URL until ``unlock()``, or until another run claims it."""
        if self._owner is not None:
            return False
        owner = {"token": secrets.token_hex(8), "host": socket.gethostname(), "process": os.getpid()}
        self._folder.write(_OWNER, json.dumps(owner).encode())
        self._owner, self._has_saved = owner, False
        self._incomplete = [name for name in self._all_names() if self._manifest(name) is None]
        return True

    def remove_incomplete(self) -> None:
        """Remove incomplete states of killed runs, after this run has completed a state.

        Before that, the run that it took over from may still be saving; by now, that run has ended or completed its
        state.
        """
        for name in self._incomplete:
            if self._manifest(name) is None:
                self._folder.remove(name)
        self._incomplete, self._has_saved = [], True

    def unlock(self) -> None:
        """Give up the claim, unless another run has taken over. Once states are saved, no older run may save here."""
        owner, self._owner = self._owner, None
        if owner is not None and not self._has_saved:
            with suppress(OSError):
                if self._read_json(_OWNER) == owner:
                    self._folder.remove(_OWNER)

    def _check_lock_on_this_rank(self) -> None:
        newest = self._read_json(_OWNER)
        if newest and newest != self._owner:
            raise RuntimeError(
                f"Another run (process {newest['process']} on {newest['host']}) has started to save its training "
                f"states in {self.location!r}, so this one ends. Give each run a save_dir of its own."
            )

    def _manifest(self, name: str) -> JsonObject | None:
        return self._read_json(f"{name}/{MANIFEST}")

    def _read_json(self, name: str) -> JsonObject | None:
        """Return the content of an object: empty if it is damaged, ``None`` if it does not exist."""
        try:
            content = json.loads(self._folder.read(name))
        except FileNotFoundError:
            return None
        except ValueError:
            return {}
        return content if isinstance(content, dict) else {}


class RemoteStore(Store):
    """The store of all URLs that fsspec knows."""

    def states(self, url: str) -> RemoteStates:
        """Return the states of a run at a URL."""
        return RemoteStates(url)

    def write_state(self, url: str, ranks: Ranks, captured: CapturedState) -> None:
        """Upload a training state. All ranks take part, and all raise an error if one fails."""
        folder = RemoteFolder(url)
        subfolder = ranks.result_of_first(lambda: f"files-{secrets.token_hex(4)}")

        def upload() -> dict[str, JsonObject]:
            with _temporary_directory() as directory:
                entries = write_files(directory, ranks.rank, captured)
                for name in entries:
                    folder.upload(directory / name, f"{subfolder}/{name}")
            return entries

        try:
            entries = ranks.run_together(upload)
            text = manifest_text(entries, {**captured.metadata, "folder": subfolder})
            ranks.run_together(lambda: folder.write(MANIFEST, text.encode()), only_first=True)
        except BaseException:
            if ranks.rank == 0:
                with suppress(OSError):
                    folder.remove(subfolder)
            raise
        if ranks.rank == 0:
            with suppress(OSError):
                for name in folder.names():
                    if name not in (MANIFEST, subfolder):  # files of an earlier or an interrupted save
                        folder.remove(name)

    def read_state(self, url: str, ranks: Ranks) -> TrainingState:
        """Fetch a state to each machine, verify it there and read it, including the weights. All ranks take part."""
        with _temporary_directory() as directory:

            def download() -> tuple[Path, JsonObject | DamagedStateError] | None:
                is_local_main = PartialState().is_local_main_process
                return (directory, catch_damage(lambda: _download_verified(url, directory))) if is_local_main else None

            outcomes = ranks.run_together(download)
            for outcome in outcomes:
                if outcome is not None and isinstance(outcome[1], DamagedStateError):
                    raise outcome[1]
            # One process per machine has fetched the state: the nearest one at or below this rank.
            fetched, manifest = [outcome for outcome in outcomes[: ranks.rank + 1] if outcome is not None][-1]
            state = read_verified(fetched, manifest, ranks)  # type: ignore[arg-type]
            state.directory = url

            def read() -> None:
                state.weights = read_model(fetched)

            ranks.run_together(read)
            return state

    @contextmanager
    def fetch_state(self, url: str) -> Iterator[Path]:
        """Yield the directory of a verified copy of a state."""
        with _temporary_directory() as directory:
            _download_verified(url, directory)
            yield directory

    @contextmanager
    def fetch_weights(self, url: str) -> Iterator[Path]:
        """Yield a temporary directory with the safetensors files at a URL, or with the file that the URL names.

        Raises:
            FileNotFoundError: if there are no safetensors files
        """
        address, name = os.path.split(url) if url.endswith(".safetensors") else (url, WEIGHTS)
        folder = RemoteFolder(address, "checkpoint_path")
        names = [name for name in folder.names() if name.endswith((".safetensors", ".safetensors.index.json"))]
        if name in names or address != url:
            names = [name] if name in names else []
        if not names:
            raise FileNotFoundError(f"There is no checkpoint at {url!r}: it has no weights as safetensors.")
        with _temporary_directory() as directory:
            for name in names:
                folder.fetch(name, directory / name)
            yield directory

    @contextmanager
    def collect(self, url: str) -> Iterator[Path]:
        """Yield a directory whose files are uploaded to a URL.

        If the URL has a model card, the directory has a copy, which is uploaded again only if it has changed.
        """
        folder = RemoteFolder(url, "path")
        with _temporary_directory() as directory:
            card = b""
            with suppress(FileNotFoundError):
                card = folder.read(CARD)
                (directory / CARD).write_bytes(card)
            yield directory
            files = sorted((path for path in directory.rglob("*") if path.is_file()), reverse=True)
            for file in files:  # the card last: it describes the other files
                if file.name != CARD or file.read_bytes() != card:
                    folder.upload(file, file.relative_to(directory).as_posix())
