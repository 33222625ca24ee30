"""The training states of a run in one place: their names, finding the newest intact one, removing old ones, locking."""

from __future__ import annotations

import os
import re
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from pytorch_accel_lite.checkpoint.disk.atomic_files import remove
from pytorch_accel_lite.checkpoint.disk.locks import FileLock, LockedError
from pytorch_accel_lite.checkpoint.disk.shared_disks import check_is_shared
from pytorch_accel_lite.checkpoint.states.manifest import DamagedStateError, read_manifest, recover
from pytorch_accel_lite.checkpoint.states.state_files import read_directory
from pytorch_accel_lite.distributed import Ranks
from pytorch_accel_lite.run.training_state import TrainingState

_LOCK = ".lock"
_HEARTBEAT_SECONDS = 5.0
STATE_NAME = re.compile(r"update-\d{9,}")
_REMAINS = re.compile(r"\.(update-\d{9,})\.(?:previous|tmp|removed)")


def state_name(update: int) -> str:
    """Return the name of the state after an update; names sort in the order of updates."""
    return f"update-{update:09d}"


def _show_life(lock: FileLock, is_unlocked: threading.Event) -> None:
    """Touch a lock at intervals, so that its time shows when the run was last alive."""
    while not is_unlocked.wait(_HEARTBEAT_SECONDS):
        lock.touch()


def _release(lock: FileLock, is_unlocked: threading.Event) -> None:
    is_unlocked.set()
    lock.release()


class StateStore(ABC):
    """The states of a run. Other files in the same place are left alone.

    Attributes:
        NAME: the pattern of the names of states
        location: the directory, or the URL
        alive_at: when an earlier run was last known to be alive, if at all
    """

    NAME: ClassVar[re.Pattern[str]] = STATE_NAME
    location: Path | str
    alive_at: float | None = None

    def path_for(self, update: int) -> Path | str:
        """Return the path or URL of the state after an update."""
        return self._path(state_name(update))

    @abstractmethod
    def _path(self, name: str) -> Path | str: ...

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names of all states, intact or not."""

    @abstractmethod
    def saved_at(self, name: str) -> float:
        """Return when a state was saved, even if it is damaged, by the clock of the machine that saved it."""

    @abstractmethod
    def read(self, name: str, ranks: Ranks) -> TrainingState:
        """Verify and read a state. All ranks take part.

        Raises:
            DamagedStateError: on all ranks, if it is damaged
        """

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a state. It disappears from ``names()`` at once, however long the removal takes."""

    @abstractmethod
    def lock(self) -> bool:
        """Claim the location until ``unlock()``, and remove remains of killed runs. Does nothing if already claimed.

        Returns:
            whether this call has claimed the location

        Raises:
            RuntimeError: if another live run has locked it
            OSError: if the location cannot be written
        """

    def check_is_shared(self, ranks: Ranks) -> None:  # noqa: B027
        """Check that all ranks reach the same location, which they always do by a URL. All ranks take part.

        Raises:
            OSError: on all ranks, if they reach different locations
        """

    @abstractmethod
    def unlock(self) -> None:
        """Give up the claim."""

    @abstractmethod
    def _check_lock_on_this_rank(self) -> None: ...

    def check_lock(self, ranks: Ranks) -> None:
        """Check, on all ranks, that no other run has taken over.

        Raises:
            RuntimeError: if another run has taken over
        """
        ranks.run_together(self._check_lock_on_this_rank, only_first=True)

    def newest_first(self) -> list[str]:
        """Return the names of all states, the newest first."""
        times = {name: self.saved_at(name) for name in self.names()}
        return sorted(times, key=lambda name: (times[name], name), reverse=True)

    def newest_time(self) -> float:
        """Return when the newest state was saved; 0 if there is none."""
        return max(map(self.saved_at, self.names()), default=0.0)

    def read_latest(self, ranks: Ranks, report: Callable[[str], object]) -> TrainingState | None:
        """Return the newest intact state, or ``None`` if there is none. All ranks take part.

        Args:
            report: called with a message for each damaged state that is skipped

        Raises:
            DamagedStateError: if there are states, but all are damaged
        """
        problems = []
        for name in ranks.result_of_first(self.newest_first):
            try:
                return self.read(name, ranks)
            except DamagedStateError as error:
                problems.append(str(error))
                report(f"Skipping a damaged training state. {error}")
        if problems:
            raise DamagedStateError(
                f"All training states in {os.fspath(self.location)!r} are damaged: {' '.join(problems)} Remove them to "
                "start over."
            )
        return None

    def remove_incomplete(self) -> None:  # noqa: B027
        """Remove incomplete states of killed runs that ``lock()`` could not remove yet, once this run has saved one."""


class DirectoryStore(StateStore):
    """The states of a run in a directory. Locking creates it."""

    location: Path

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.location = Path(directory)
        self._lock: FileLock | None = None
        self._unlock: weakref.finalize[..., DirectoryStore] | None = None  # code outside runs may not unlock

    def _path(self, name: str) -> Path:
        return self.location / name

    def names(self) -> list[str]:
        """Return the names of all directories of states."""
        return [path.name for path in self.location.iterdir() if path.is_dir() and STATE_NAME.fullmatch(path.name)]

    def saved_at(self, name: str) -> float:
        """Return when a state was saved."""
        path = self._path(name)
        try:
            return float(read_manifest(path)["saved_at"])
        except (ValueError, OSError, KeyError):
            return path.stat().st_mtime

    def read(self, name: str, ranks: Ranks) -> TrainingState:
        """Verify and read a state. All ranks take part."""
        return read_directory(self._path(name), ranks)

    def remove(self, name: str) -> None:
        """Remove a state."""
        removed = self.location / f".{name}.removed"
        remove(removed)  # what an earlier attempt has left
        self._path(name).rename(removed)
        remove(removed)

    def lock(self) -> bool:
        """Lock the directory until ``unlock()`` or the end of the process."""
        if self._lock is not None:
            return False
        try:
            self.location.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise NotADirectoryError(
                f"save_dir={os.fspath(self.location)!r} is not a directory, but training states need one. Pass "
                "another save_dir, or move what is there."
            ) from None
        try:
            lock = FileLock(self.location / _LOCK)
        except LockedError as error:
            raise RuntimeError(
                f"Another run (process {error.owner}) is saving its training states in {os.fspath(self.location)!r}. "
                "Wait for it, end it, or give this run another save_dir."
            ) from None
        self._lock, self.alive_at = lock, lock.alive_at
        is_unlocked = threading.Event()
        threading.Thread(target=_show_life, args=(lock, is_unlocked), daemon=True, name="signs-of-life").start()
        self._unlock = weakref.finalize(self, _release, lock, is_unlocked)
        for path in self.location.iterdir():
            if match := _REMAINS.fullmatch(path.name):
                recover(self._path(match[1]))
                remove(path)
        return True

    def check_is_shared(self, ranks: Ranks) -> None:
        """Check that all ranks see the same directory, because each writes its part there."""
        check_is_shared(self.location, f"save_dir={os.fspath(self.location)!r}", ranks)

    def unlock(self) -> None:
        """Give up the claim."""
        if self._unlock is not None:
            self._unlock()
            self._lock = self._unlock = None

    def _check_lock_on_this_rank(self) -> None:
        """Lock the directory again if it was removed."""
        if self._lock is None or not self._lock.is_held():
            self.unlock()
            self.lock()


def remove_old_states(store: StateStore, keep: int | None, protected: set[str]) -> None:
    """Remove all but the newest states, and what killed runs have left incomplete.

    Args:
        keep: the number of newest states to keep; ``None`` keeps all
        protected: names of states that are kept in any case
    """
    for name in [] if keep is None else store.newest_first()[keep:]:
        if name not in protected:
            store.remove(name)
    store.remove_incomplete()
