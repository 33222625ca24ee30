"""Locks on the outputs of a run, so that two runs never write to the same place."""

from __future__ import annotations

import errno
import os
import re
import threading
from contextlib import suppress
from pathlib import Path
from typing import IO

from pytorch_accel_lite.base.warnings_and_errors import add_note
from pytorch_accel_lite.checkpoint.disk.atomic_files import hidden_name, no_link, try_lock

_OF_A_LOCK = re.compile(rb"[\d\s\0]{0,64}")
_NO_ACCESS = (errno.EACCES, errno.EPERM, errno.EROFS)

# A system lock belongs to a process. A second run of the same process would also get the lock, and would free it for
# both by closing the file. So this process remembers the files that it has locked, by device and inode, and never opens
# one of them a second time.
_held: dict[tuple[int, int], int] = {}
_guard = threading.RLock()  # finalizers take it, too, at any time


class LockedError(RuntimeError):
    """Another run holds the lock.

    Attributes:
        owner: the number of the other run's process, or ``"unknown"``
    """

    def __init__(self, owner: str) -> None:
        super().__init__(owner)
        self.owner = owner


class FileLock:
    """A lock that is held until ``release()``, or until the process ends in any way.

    Args:
        path: a file that exists only for the lock; created if missing. Links are not followed, and a file that is not a
            lock is not touched.
        is_temporary: whether to remove the file when the lock is released

    Attributes:
        alive_at: when an earlier holder was last known to be alive, if at all

    Raises:
        LockedError: if another run, of this or any other process, holds the lock
        OSError: if the file cannot be created, or is not a lock
    """

    alive_at: float | None = None

    def __init__(self, path: Path, is_temporary: bool = False) -> None:
        self.path = path
        self._is_temporary = is_temporary
        with _guard:
            file = self._open()
            while not self._is_in_place(file):  # the former holder may have removed the file
                file.close()
                file = self._open()
            self._file = file
            _held[self._key] = os.getpid()
        try:
            file.seek(0)
            if file.read(1):
                self.alive_at = os.fstat(file.fileno()).st_mtime
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
        except BaseException:  # such as a full disk
            self.release()
            raise

    @property
    def _key(self) -> tuple[int, int]:
        return _identity(os.fstat(self._file.fileno()))

    def _open(self) -> IO[str]:
        """Open the file and lock it."""
        with suppress(FileNotFoundError):
            if _held.get(_identity(os.lstat(self.path))) == os.getpid():
                raise LockedError(f"{os.getpid()}, which is this one")
        file = open(self.path, "a+", opener=no_link)  # noqa: SIM115
        try:
            if not _OF_A_LOCK.fullmatch(_content(file)):
                raise OSError(errno.EEXIST, "This file has the name of a lock, but is not one. Move it", str(self.path))
            if not try_lock(file):
                raise LockedError(_content(file).decode(errors="replace").strip() or "unknown")
        except BaseException:
            file.close()
            raise
        return file

    def _is_in_place(self, file: IO[str]) -> bool:
        with suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(file.fileno()), os.lstat(self.path))
        return False

    def is_held(self) -> bool:
        """Whether this object still holds the lock, which it does not if somebody has removed the file.

        If this process has lost the lock by closing another handle of the file, as when copying the folder, it takes
        the lock again.
        """
        return self._is_in_place(self._file) and try_lock(self._file)

    def touch(self) -> None:
        """Update the time of the file, to show that the holder is alive."""
        with suppress(OSError):
            os.utime(self.path, follow_symlinks=False)

    def release(self) -> None:
        """Give up the lock, in the process that has taken it."""
        if self._file.closed:
            return
        with _guard:
            is_own = _held.get(self._key) == os.getpid()
            if is_own:
                del _held[self._key]
                if self._is_temporary and self._is_in_place(self._file):
                    with suppress(OSError):
                        self.path.unlink()
            self._file.close()


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _content(file: IO[str]) -> bytes:
    return os.pread(file.fileno(), 1 << 10, 0)


def lock_path(argument: str, path: str | os.PathLike[str]) -> FileLock:
    """Lock a path to which a run writes, by a hidden file beside it that is removed with the lock.

    If the parent folder cannot be written, the hidden file is inside the path.

    Args:
        argument: name of the argument with the path, for the error

    Raises:
        RuntimeError: if another run writes to the path
        OSError: if neither folder can be written: training would end with that error
    """
    refused: OSError | None = None
    target = Path(os.path.realpath(path))
    beside, within = target.parent / hidden_name(target.name, "lock"), target / ".run.lock"
    for place in (beside, within) if target.is_dir() else (beside,):
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            return FileLock(place, is_temporary=True)
        except LockedError as error:
            raise RuntimeError(
                f"{argument}={os.fspath(path)!r}: another run (process {error.owner}) writes there. Wait for it, end "
                f"it, or give this run another {argument}."
            ) from None
        except OSError as error:
            if error.errno not in _NO_ACCESS:
                raise
            refused = error
    assert refused is not None
    refused.filename = os.fspath(path)
    add_note(refused, f"{argument}={os.fspath(path)!r} must be in a folder that can be written.")
    raise refused
