"""A directory of training states: names, finding the newest intact one, rotation and locking."""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from pytorch_accel_lite.checkpoint.files import remove, try_lock
from pytorch_accel_lite.checkpoint.training_state import (
    DamagedStateError,
    TrainingState,
    read_manifest,
    read_verified,
    recover,
    verify_state,
)
from pytorch_accel_lite.distributed import Ranks

_LOCK = ".lock"
STATE_NAME = re.compile(r"update-\d{9,}")
_WAITING = re.compile(r"\.(update-\d{9,})\.(?:previous|tmp|removed)")


def refuse_damaged(place: Path | str, problems: list[str]) -> None:
    """Raise an error if none of the states in a place is intact.

    :param problems: what is wrong with each of them; empty if there is none
    """
    if problems:
        raise DamagedStateError(
            f"All training states in {os.fspath(place)!r} are damaged: {' '.join(problems)} Remove them to start "
            "afresh."
        )


def state_name(update: int) -> str:
    """Return the name of the state after an update; names sort in the order of updates."""
    return f"update-{update:09d}"


class StateStore:
    """The states of a run in one directory, which locking creates. Other files in it are left alone."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self._lock: Any = None

    def path_for(self, update: int) -> Path:
        """Return the path of the state after an update."""
        return self.directory / state_name(update)

    def lock(self) -> None:
        """Lock the directory until :meth:`unlock` or the end of the process, and remove remains of killed runs.

        :raises RuntimeError: if another live run has locked it
        :raises OSError: if the directory cannot be written
        """
        if self._lock is not None:
            return
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise NotADirectoryError(
                f"save_dir={os.fspath(self.directory)!r} is not a directory, but training states need one. Pass "
                "another save_dir, or move what is there."
            ) from None
        file = open(self.directory / _LOCK, "a+")  # noqa: SIM115
        if not try_lock(file):
            file.seek(0)
            owner = file.read().strip() or "unknown"
            file.close()
            raise RuntimeError(
                f"Another run (process {owner}) is saving its training states in {os.fspath(self.directory)!r}. Wait "
                "for it, end it, or give this run another save_dir."
            )
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        self._lock = file
        self._closing = weakref.finalize(self, file.close)  # a run that fails before it begins never unlocks
        self._tidy()

    def unlock(self) -> None:
        """Unlock the directory."""
        if self._lock is not None:
            self._lock.close()
            self._closing.detach()  # it would hold the file of each run for as long as the callback lives
            self._lock = None

    def check_lock(self, ranks: Ranks) -> None:
        """Check, on all ranks, that no other run has taken over: if the directory was removed, it is locked again.

        :raises RuntimeError: if another run has locked it since
        """
        ranks.run_together(self._lock_again, only_first=True)

    def _lock_again(self) -> None:
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(self._lock.fileno()), os.stat(self.directory / _LOCK)):
                return
        self.unlock()
        self.lock()

    def _tidy(self) -> None:
        for path in self.directory.iterdir():
            if match := _WAITING.fullmatch(path.name):
                recover(self.directory / match[1])
                remove(path)

    def _states(self) -> list[Path]:
        """Return all states, newest first."""
        found = [path for path in self.directory.iterdir() if path.is_dir() and STATE_NAME.fullmatch(path.name)]
        return sorted(found, key=lambda path: (saved_at(path), path.name), reverse=True)

    def read_latest(self, ranks: Ranks, report: Callable[[str], object]) -> TrainingState | None:
        """Return the newest intact state, as :meth:`find_latest` finds it. All ranks take part."""
        found = ranks.broadcast_object(lambda: self._verify_latest(report))
        return None if found is None else read_verified(*found, ranks)

    def has_states(self) -> bool:
        """Whether there are any states, intact or not."""
        return bool(self._states())

    def newest_time(self) -> float:
        """Return when the newest state was saved, by the clock of the machine that did so; 0 if there is none."""
        return max(map(saved_at, self._states()), default=0.0)

    def find_latest(self, report: Callable[[str], object]) -> Path | None:
        """Return the newest intact state, or ``None`` if there is no state at all.

        :param report: called with a message for each damaged state that is skipped
        :raises DamagedStateError: if there are states, but all are damaged
        """
        found = self._verify_latest(report)
        return None if found is None else found[0]

    def _verify_latest(self, report: Callable[[str], object]) -> tuple[Path, dict[str, Any]] | None:
        """Return the newest intact state and its manifest."""
        problems = []
        for path in self._states():
            try:
                return path, verify_state(path)
            except DamagedStateError as error:
                problems.append(str(error))
                report(f"Skipping a damaged training state. {error}")
        refuse_damaged(self.directory, problems)
        return None

    def rotate(self, keep: int | None, protected: set[str]) -> None:
        """Remove all but the newest ``keep`` states, sparing those with protected names; ``None`` keeps all."""
        if keep is None:
            return
        for path in self._states()[keep:]:
            if path.name not in protected:
                removed = path.with_name(f".{path.name}.removed")
                path.rename(removed)  # stops being a state at once, however long removal takes
                remove(removed)


def saved_at(path: Path) -> float:
    """Return when a state was saved, also if it is damaged."""
    try:
        return float(read_manifest(path)["saved_at"])
    except (ValueError, OSError, KeyError):
        return path.stat().st_mtime
