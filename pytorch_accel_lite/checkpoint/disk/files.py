"""Writing files durably before the call returns, and reading them without running code."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import json
import os
import re
import secrets
import shutil
import socket
import stat
import time
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
import safetensors.torch
import torch

from pytorch_accel_lite.base.paths import PathOrFile, StrPath, check_open_file, local_path, name_of
from pytorch_accel_lite.base.types import Keys, StateDict, Tree
from pytorch_accel_lite.base.user_warnings import warn_outside
from pytorch_accel_lite.checkpoint.disk.checksums import UNSEALED, sealed, verify, verify_content
from pytorch_accel_lite.distributed import Ranks

_LONGEST_NAME = 230  # bytes; file systems allow 255, and hidden names are longer
_SECONDS_TO_APPEAR = 3.0  # time that a file may take to appear on a shared disk
_SECONDS_UNTIL_STALE = 600  # a process that is still writing a temporary file has modified it more recently
#: The entry of a checkpoint with the checksums of weights that were left out.
FROZEN = "frozen_weights"
#: Functions that are called before a file or a state takes its place, and raise an error if this process may not write.
FENCES: list[Callable[[], None]] = []
# Needed to load numpy numbers, but not allowed by torch by default. They run no code from a file.
_NUMPY_NUMBERS: list[Any] = [
    np.dtype,
    (np.float64().__reduce__()[0], "numpy.core.multiarray.scalar"),  # written by numpy 1
    (np.float64().__reduce__()[0], "numpy._core.multiarray.scalar"),
    *{type(np.dtype(code)) for code in "?bhilqBHILQefd"},
]
_PLAIN = frozenset({torch.Tensor, str, bytes, bool, int, float, complex, type(None)})


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
    try:
        yield
    except (OSError, RuntimeError, safetensors.SafetensorError) as error:
        number = _error_number(error)
        if number is None:
            raise
        raise OSError(number, os.strerror(number), os.fspath(path)) from None


def _error_number(error: BaseException | None) -> int | None:
    """Return the system's number of the error that led to this one; ``None`` if there was none."""
    if isinstance(error, safetensors.SafetensorError):
        match = re.search(r"(?:os error|code:) (\d+)", str(error))
        return int(match[1]) if match else errno.EIO
    while isinstance(error, RuntimeError):
        error = error.__context__
    return error.errno if isinstance(error, OSError) else None


def check_is_shared(directory: Path, name: str, ranks: Ranks) -> None:
    """Check that all ranks see the same directory, in which each will write, and create it. All ranks take part.

    Args:
        name: what to call it in the error

    Raises:
        OSError: on all ranks, if they see different directories
    """
    if ranks.world_size == 1:
        return

    def create_mark() -> str:
        name = f".{secrets.token_hex(4)}.tmp"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / name).touch()
        return name

    mark = directory / ranks.result_of_first(create_mark)
    try:
        ranks.run_together(lambda: require_shared(mark, name))
    finally:
        if ranks.rank == 0:
            mark.unlink(missing_ok=True)


def require_shared(path: Path, name: str) -> None:
    """Wait until a path appears that the first process has created in a shared directory, perhaps on another machine.

    Args:
        name: what to call the directory in the error

    Raises:
        FileNotFoundError: if the path does not appear
    """
    end = time.monotonic() + _SECONDS_TO_APPEAR
    while not path.exists():
        if time.monotonic() > end:
            raise FileNotFoundError(
                f"{name} is not the directory of the first process on {socket.gethostname()}, in {os.getcwd()}, but "
                "every process writes its part there. Pass the absolute path of a directory that all processes share; "
                "training states may also be at a URL, such as 's3://bucket/run'."
            )
        time.sleep(0.05)


def check_on_all_ranks(ranks: Ranks, look_at: Callable[[], object]) -> None:
    """Check a file that a user has opened. Call it on every process.

    Raises:
        TypeError: on all processes, if any raises it; likewise ``ValueError``
    """

    def find_problem() -> TypeError | ValueError | None:
        try:
            look_at()
        except (TypeError, ValueError) as error:
            return error.with_traceback(None)
        return None

    for problem in ranks.run_together(find_problem):
        if problem is not None:
            raise problem


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
    """Yield a temporary path that is synced and replaces ``target``, or is removed when the block fails."""
    with naming_file(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale_files(target)
    temporary = target.with_name(hidden_name(target.name, f"{secrets.token_hex(4)}.tmp"))
    try:
        with naming_file(target):
            temporary.touch(exist_ok=False)
            yield temporary
            sync(temporary)
            check_fences()
            temporary.replace(target)
    except BaseException:
        with suppress(OSError):  # the disk may not be writable at all
            temporary.unlink()
        raise


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


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def _remove_stale_files(target: Path) -> None:
    """Remove temporary files of processes that were killed while writing a file."""
    name = re.compile(re.escape(hidden_name(target.name, "")) + r"[0-9a-f]{8}\.tmp")
    for path in target.parent.iterdir():
        if name.fullmatch(path.name):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > _SECONDS_UNTIL_STALE:
                    path.unlink()


def storable(value: Tree, path: str) -> Tree:
    """Convert a value to types that ``torch.load(weights_only=True)`` can load; numpy numbers become Python numbers.

    Args:
        path: name of the value in the error

    Raises:
        TypeError: if the value, or one nested in it, cannot be converted; names the path to it
    """
    if type(value) in _PLAIN or isinstance(value, (torch.Tensor, str, bytes)):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        converted = {storable(k, f"{path}.keys()"): storable(v, f"{path}[{k!r}]") for k, v in value.items()}
        return type(value)(converted) if isinstance(value, (OrderedDict, Counter)) else converted
    if type(value) in (list, tuple, set):
        return type(value)(storable(item, f"{path}[{i}]") for i, item in enumerate(value))
    raise TypeError(
        f"{path} is {type(value).__name__}, which cannot be stored without pickle. Store numbers, strings, tensors, "
        "and lists, tuples, sets or dicts of them."
    )


def map_nested(
    function: Callable[[Keys, Tree], Tree],
    value: Tree,
    path: Keys = (),
    is_leaf: Callable[[object], bool] = lambda value: False,
) -> Tree:
    """Apply a function to the values in nested dicts, lists and tuples, as ``storable()`` returns them.

    It is like torch's ``tree_map_with_path``, at a fraction of the cost.

    Args:
        function: takes the keys and indices that lead to a value, and the value
        is_leaf: whether a dict counts as a value
    """
    if isinstance(value, dict) and not is_leaf(value):
        items = {key: map_nested(function, item, (*path, key), is_leaf) for key, item in value.items()}
        return type(value)(items) if isinstance(value, (OrderedDict, Counter)) else items
    if type(value) in (list, tuple):
        return type(value)([map_nested(function, item, (*path, index), is_leaf) for index, item in enumerate(value)])
    return function(path, value)


def write_plain(value: Tree, path: Path) -> None:
    """Write a value to be loaded with ``load_plain()``, without syncing the file."""
    with naming_file(path), open(path, "wb") as file:
        torch.save(value, file)


def load_plain(path: Path | io.BytesIO, mapped: bool = False, name: str | None = None) -> Tree:
    """Load a file written by ``torch.save`` onto the CPU, without running code from the file.

    Args:
        mapped: whether to leave the tensors in the file until they are used
        name: name of the file in the error, instead of its path

    Raises:
        ValueError: if the file cannot be loaded without running code
    """
    try:
        with torch.serialization.safe_globals(_NUMPY_NUMBERS):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # a damaged file makes torch raise almost anything
        raise ValueError(
            f"The file {name or str(path)!r} cannot be loaded as plain tensors and values: it is damaged, or holds "
            f"objects that cannot be rebuilt without running code ({type(error).__name__})."
        ) from error


def load_verified(path: Path) -> Tree:
    """Load a single file written by ``torch.save``, after checking its content against its own checksums.

    Raises:
        ValueError: if the file is damaged, or cannot be loaded without running code
    """
    verify(path)
    return load_plain(path)


def untie(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return tensors in which tied tensors have a single name, and a dict from their other names to that name."""
    kept: dict[object, str] = {}
    tied = {}
    for name, tensor in tensors.items():
        start = tensor.untyped_storage().data_ptr(), tensor.storage_offset()
        memory = (*start, tensor.shape, tensor.stride(), tensor.dtype)
        if kept.setdefault(memory, name) != name:
            tied[name] = kept[memory]
    return {name: tensor for name, tensor in tensors.items() if name not in tied}, tied


def write_tensors(tensors: Mapping[str, torch.Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors as safetensors, without syncing the file. Tied tensors are not supported: each gets its own copy.

    Args:
        metadata: further texts to store in the file, by name

    Raises:
        OSError: if the file cannot be written
    """
    separate = _separate(tensors)
    path.touch()
    mode = path.stat().st_mode
    with naming_file(path):
        safetensors.torch.save_file(separate, path, metadata={"format": "pt"} | dict(metadata or {}))
    path.chmod(mode)  # safetensors creates files that only their owner can read


def write_sealed(tensors: Mapping[str, torch.Tensor], file: IO[bytes], metadata: Mapping[str, str]) -> None:
    """Write tensors as safetensors with a checksum to an open file, as ``write_tensors()`` does to a path."""
    content = safetensors.torch.save(_separate(tensors), metadata={"format": "pt", **UNSEALED, **metadata})
    whole = _Whole(file)
    with naming_file(name_of(file)):
        whole.write(sealed(content))
        whole.flush()


def _separate(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return contiguous tensors that share no memory."""
    separate: dict[str, torch.Tensor] = {}
    storages = set()
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr()
        is_shared = storage in storages
        separate[name] = tensor.clone(memory_format=torch.contiguous_format) if is_shared else tensor.contiguous()
        storages.add(storage)
    return separate


class _Whole:
    """An open file that writes all data it is given: a file without a buffer may take less at a time."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file

    def write(self, data: bytes | memoryview) -> int:
        rest = memoryview(data)
        while rest:
            taken = self.file.write(rest)
            rest = rest[len(rest) if taken is None else taken :]  # some files do not report how much they took
        return len(data)

    def flush(self) -> None:
        getattr(self.file, "flush", lambda: None)()


def open_tensors(path: StrPath) -> tuple[Any, dict[str, str]]:
    """Return an open safetensors file, and the texts stored in it. The open file may be removed.

    Raises:
        ValueError: if it is damaged
    """
    try:
        file: Any = safetensors.safe_open(path, framework="pt")
    except safetensors.SafetensorError as error:
        raise ValueError(f"The file {os.fspath(path)!r} is damaged, or not a safetensors file. {error}") from error
    return file, file.metadata() or {}


def write_checkpoint(checkpoint: StateDict, path: PathOrFile) -> None:
    """Write a checkpoint atomically: even if the process is killed, ``path`` has either the old or the new checkpoint.

    Args:
        path: the path, or a binary file or ``io.BytesIO``, which is written from its position, flushed, and left open.
            Writing to an open file is not atomic.

    Raises:
        ValueError: if ``path`` is a URL, or a file that is closed or cannot be written
        TypeError: if an entry could not be loaded again without running code; names the path to it
        OSError: if the file cannot be written; the previous file is left unchanged
    """
    check_open_file("path", path, to_write=True)
    content = storable(checkpoint, "checkpoint")
    if not isinstance(path, (str, os.PathLike)):
        with naming_file(name_of(path)):
            torch.save(content, _Whole(path))  # type: ignore[arg-type]  # has what torch needs of a file
        return
    with replacing(local_path("path", path, "a checkpoint")) as temporary:
        write_plain(content, temporary)


def read_checkpoint(path: PathOrFile, *, is_verified: bool = False) -> StateDict:
    """Read a checkpoint, or weights alone, from a safetensors or torch file onto the CPU, without running code.

    Args:
        path: the path, or an open binary file, which is read from its position to its end into memory, verified, and
            left open
        is_verified: whether the content has already been compared with its checksums, for example by another process

    Raises:
        FileNotFoundError: if the file does not exist
        ValueError: if the file is damaged, is not a checkpoint, or holds objects that need code to be rebuilt
    """
    check_open_file("path", path, to_write=False)
    if not isinstance(path, (str, os.PathLike)):
        return _read_open(path)
    if not Path(path).is_file():
        raise FileNotFoundError(f"There is no checkpoint at {os.fspath(path)!r}.")
    if not is_verified:
        verify(Path(path))
    if Path(path).suffix == ".safetensors":
        _, metadata = open_tensors(path)
        weights = safetensors.torch.load_file(path)
        return {"model_state_dict": weights, FROZEN: json.loads(metadata.get(FROZEN, "{}"))}
    return _entries_of(load_plain(Path(path)), os.fspath(path))


def _read_open(file: IO[bytes]) -> StateDict:
    """Read a checkpoint from the position of an open file to its end. Its first bytes determine the format."""
    name, content = name_of(file), file.read()
    length = int.from_bytes(content[:8], "little")
    if content[8:9] == b"{" and 8 + length <= len(content):
        verify_content(content, name, is_safetensors=True)
        try:
            weights = safetensors.torch.load(content)
        except safetensors.SafetensorError as error:
            raise ValueError(f"The file {name!r} is damaged, or not a safetensors file. {error}") from error
        metadata = json.loads(content[8 : 8 + length]).get("__metadata__", {})
        return {"model_state_dict": weights, FROZEN: json.loads(metadata.get(FROZEN, "{}"))}
    verify_content(content, name, is_safetensors=False)
    if zipfile.is_zipfile(io.BytesIO(content)):
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            if min((record.header_offset for record in archive.infolist()), default=0):  # torch would mix them up
                raise ValueError(
                    f"The last checkpoint in the file {name!r} does not begin at its position. Call seek() with the "
                    "position at which it was written, and keep other checkpoints in files of their own."
                )
    return _entries_of(load_plain(io.BytesIO(content), name=name), name)


def _entries_of(checkpoint: Tree, name: str) -> StateDict:
    """Return the entries of a checkpoint that torch has read.

    Raises:
        ValueError: if the file is not a checkpoint; names the file
    """
    entries = checkpoint if isinstance(checkpoint, dict) else {}
    if entries and all(isinstance(value, torch.Tensor) for value in entries.values()):
        return {"model_state_dict": checkpoint}  # as saved by torch.save(model.state_dict(), path)
    if "model_state_dict" not in entries:
        raise ValueError(
            f"The file {name!r} is not a checkpoint: it has no 'model_state_dict'. It holds "
            f"{', '.join(map(repr, entries)) or type(checkpoint).__name__}. Load what you need of it yourself, such as "
            "model.load_state_dict(torch.load(path)['state_dict'])."
        )
    return entries
