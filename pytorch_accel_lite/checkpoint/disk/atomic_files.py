"""Writing files so that they are complete and on the disk, or not there at all; whole states: ``state_files.py``."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import safetensors.torch

from pytorch_accel_lite.base.paths import StrPath
from pytorch_accel_lite.base.warnings_and_errors import warn_outside

_LONGEST_NAME = 230  # bytes; file systems allow 255, and hidden names are longer
_SECONDS_UNTIL_STALE = 600  # a process that is still writing a temporary file has modified it more recently
#: Functions that are called before a file or a state takes its place, and raise an error if this process may not write.
FENCES: list[Callable[[], None]] = []


def sync(path: Path) -> None:
    """Flush a file, or the entries of a directory, to disk, so that it survives a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming_file(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a directory with its contents, a file, or a link but not its target; errors are ignored."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


@contextmanager
def naming_file(path: StrPath) -> Iterator[None]:
    """Convert system errors while a file is written, such as a full disk, to an ``OSError`` that names the file.

    torch and safetensors raise other kinds of errors, and Python's errors do not name a file once it is open. The
    chained tracebacks are left out, because the new error has the system's message.
    """
    before = sys.exception()  # the save may be due to an error
    try:
        yield
    except (OSError, RuntimeError, safetensors.SafetensorError) as error:
        number = _error_number(error, before)
        if number is None:
            raise
        raise OSError(number, os.strerror(number), os.fspath(path)) from None


def _error_number(error: BaseException | None, before: BaseException | None) -> int | None:
    """Return the system's number of the error that led to this one after another one; ``None`` if there was none."""
    if isinstance(error, safetensors.SafetensorError):
        match = re.search(r"(?:os error|code:) (\d+)", str(error))
        return int(match[1]) if match else errno.EIO
    while isinstance(error, RuntimeError) and error.__context__ is not before:
        error = error.__context__
    return error.errno if isinstance(error, OSError) else None


def no_link(path: str, flags: int) -> int:
    """Open a file for ``open(..., opener=no_link)``, but not through a link that somebody may have put in its place.

    Raises:
        OSError: if the path is a symbolic link (links among its folders are followed), or not a regular file
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(error.errno, "Links are not followed here. Remove this one", path) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "This is not a file that can be written. Remove it", path)
    return descriptor


def hidden_name(name: str, suffix: str) -> str:
    """Return the name of a hidden file that belongs to a file, even if that file has the longest possible name."""
    encoded = os.fsencode(name)
    if len(encoded) > _LONGEST_NAME:
        name = hashlib.sha256(encoded).hexdigest()[:32]
    return f".{name}.{suffix}"


def check_fences() -> None:
    """Check that this process may write. It may not if its job has continued without it."""
    for check in FENCES:
        check()


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a temporary path that is synced and replaces ``target``, or is removed when the block fails.

    The permissions of a file that is replaced stay. A link is replaced, and its target is left alone, as in
    ``no_link()``: somebody may have put it there.
    """
    with naming_file(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale_files(target)
    temporary = target.with_name(hidden_name(target.name, f"{secrets.token_hex(4)}.tmp"))
    try:
        with naming_file(target):
            temporary.touch(exist_ok=False)
            permissions = _permissions(target)
            if permissions is not None:  # before anything is written that others may not read
                _set_permissions(temporary, permissions | stat.S_IRUSR | stat.S_IWUSR)
            yield temporary
            sync(temporary)
            if permissions is not None:
                _set_permissions(temporary, permissions)
            check_fences()
            temporary.replace(target)
            with suppress(OSError):  # some network disks cannot sync folders
                sync(target.parent)
    except BaseException:
        with suppress(OSError):  # the disk may not be writable at all
            temporary.unlink()
        raise


def _permissions(path: Path) -> int | None:
    """Return the permissions of a file; ``None`` if there is none, or anything else at the path."""
    with suppress(OSError):
        mode = path.lstat().st_mode
        return stat.S_IMODE(mode) & 0o777 if stat.S_ISREG(mode) else None
    return None


def _set_permissions(path: Path, permissions: int) -> None:
    with suppress(OSError):  # some network disks have none
        path.chmod(permissions)


def try_lock(file: IO[str] | IO[bytes]) -> bool:
    """Lock an open file until it is closed; return ``False`` if another process has the lock. Warn if unknown."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # forked workers do not inherit it
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        warn_outside(
            f"{os.fspath(file.name)!r} cannot be locked, as its disk has no file locks ({error.strerror}). The run "
            "continues without a lock: do not let another run write to the same folder."
        )
    return True


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically, in UTF-8. Characters that do not fit, as in undecodable file names, are escaped."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


def _remove_stale_files(target: Path) -> None:
    """Remove temporary files of processes that were killed while writing a file."""
    name = re.compile(re.escape(hidden_name(target.name, "")) + r"[0-9a-f]{8}\.tmp")
    for path in target.parent.iterdir():
        if name.fullmatch(path.name):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > _SECONDS_UNTIL_STALE:
                    path.unlink()
