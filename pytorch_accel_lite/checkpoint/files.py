"""Writing files durably before the call returns, and reading them without running code."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
import safetensors.torch
import torch

from pytorch_accel_lite.base.environment import available_cores, warn_outside
from pytorch_accel_lite.distributed import Ranks

_SECONDS_TO_APPEAR = 3.0  # on a shared disk
_SECONDS_UNTIL_STALE = 600  # a process that is still writing a temporary file has modified it more recently
StrPath = str | os.PathLike[str]
#: The entry of a checkpoint with the fingerprints of weights that were left out.
FROZEN = "frozen_weights"
# Needed to load numpy numbers, but not allowed by torch by default; they run no code from a file.
_NUMPY_NUMBERS: list[Any] = [
    np.dtype,
    (np.float64().__reduce__()[0], "numpy.core.multiarray.scalar"),  # written by numpy 1
    (np.float64().__reduce__()[0], "numpy._core.multiarray.scalar"),
    *{type(np.dtype(code)) for code in "?bhilqBHILQefd"},
]
_PLAIN = frozenset({torch.Tensor, str, bytes, bool, int, float, complex, type(None)})


def parse_location(path: StrPath) -> Path | str:
    """Return a path as a ``Path``, and the URL of a folder in a remote store as text without a final slash."""
    text = os.fspath(path)
    scheme, separator, rest = text.partition("://")
    if not separator:
        return Path(path)
    return Path(rest) if scheme in ("file", "local") else text.rstrip("/")


def check_is_no_url(argument: str, path: StrPath) -> None:
    """Check that a checkpoint is to be written to a disk.

    :raises ValueError: if the path is the URL of a remote store; names the argument
    """
    if isinstance(parse_location(path), str):
        raise ValueError(
            f"{argument}={os.fspath(path)!r} is a URL, but checkpoints are files on a disk. Pass a path. save_model() "
            "and SaveTrainingStateCallback take URLs."
        )


def sync(path: Path) -> None:
    """Flush a file, or the entries of a directory, to disk, so that it survives a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
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
def naming(path: Path) -> Iterator[None]:
    """Convert system errors while a file is written, such as a full disk, to an ``OSError`` that names the file.

    torch and safetensors raise other errors, and Python's errors do not name a file once it is open. Their tracebacks,
    several one below the other, are left out: what the system said is in the error.
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
    """Check that all ranks have the same directory, where each is about to write; created if missing. All take part.

    :param name: what to call it in the error
    :raises OSError: on all ranks, if they do not
    """
    if ranks.world_size == 1:
        return

    def create_mark() -> str:
        name = f".{secrets.token_hex(4)}.tmp"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / name).touch()
        return name

    mark = directory / ranks.broadcast_object(create_mark)
    try:
        ranks.run_together(lambda: require_shared(mark, name))
    finally:
        if ranks.rank == 0:
            mark.unlink(missing_ok=True)


def require_shared(path: Path, name: str) -> None:
    """Wait for what the first process has created in a directory of all, perhaps on another machine.

    :param name: what to call the directory in the error
    :raises FileNotFoundError: if it does not appear
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


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a temporary path that is synced and replaces ``target``, or is removed when the block fails."""
    with naming(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale_files(target)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        with naming(target):
            yield temporary
            sync(temporary)
            temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def try_lock(file: IO[Any]) -> bool:
    """Lock an open file until it is closed; return ``False`` if another process has locked it, and warn if unknown."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not inherited by forked workers
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        warn_outside(
            f"{os.fspath(file.name)!r} cannot be locked, as its disk has no file locks ({error.strerror}). The run "
            "continues without a lock: do not let another run write to the same folder."
        )
    return True


def _remove_stale_files(target: Path) -> None:
    """Remove temporary files of processes that were killed while writing a file."""
    name = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{8}}\.tmp")
    for path in target.parent.iterdir():
        if name.fullmatch(path.name):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > _SECONDS_UNTIL_STALE:
                    path.unlink()


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file's content as a hexadecimal string, used by states of format 1."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def storable(value: Any, path: str) -> Any:
    """Convert a value to types that ``torch.load(weights_only=True)`` can load; numpy numbers become Python numbers.

    :param path: name of the value in the error
    :raises TypeError: if the value, or one nested in it, cannot be converted; names the path to it
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
    function: Callable[[tuple[Any, ...], Any], Any],
    value: Any,
    path: tuple[Any, ...] = (),
    is_leaf: Callable[[Any], bool] = lambda value: False,
) -> Any:
    """Return nested dicts, lists and tuples, as :func:`storable` returns them, with a function of the others in them.

    Does what ``tree_map_with_path`` of torch does, at a fraction of the cost.

    :param function: takes the keys and indices that lead to a value, and the value
    :param is_leaf: whether a dict is a value itself
    """
    if isinstance(value, dict) and not is_leaf(value):
        items = {key: map_nested(function, item, (*path, key), is_leaf) for key, item in value.items()}
        return type(value)(items) if isinstance(value, (OrderedDict, Counter)) else items
    if type(value) in (list, tuple):
        return type(value)([map_nested(function, item, (*path, index), is_leaf) for index, item in enumerate(value)])
    return function(path, value)


def write_plain(value: Any, path: Path) -> None:
    """Write a value to be loaded with :func:`load_plain`, without syncing the file."""
    with naming(path), open(path, "wb") as file:
        torch.save(value, file)


def load_plain(path: Path, mapped: bool = False) -> Any:
    """Load a file written by ``torch.save`` onto the CPU, without running code from the file.

    :param mapped: whether to leave the tensors in the file until they are used
    :raises ValueError: if it cannot be loaded this way
    """
    try:
        with torch.serialization.safe_globals(_NUMPY_NUMBERS):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # a damaged file makes torch raise almost anything
        raise ValueError(
            f"The file {os.fspath(path)!r} cannot be loaded as plain tensors and values: it is damaged, or holds "
            f"objects that cannot be rebuilt without running code ({type(error).__name__})."
        ) from error


def untie(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return tensors with tied ones under a single name, and a dict from their other names to that name."""
    kept: dict[Any, str] = {}
    tied = {}
    for name, tensor in tensors.items():
        start = tensor.untyped_storage().data_ptr(), tensor.storage_offset()
        memory = (*start, tensor.shape, tensor.stride(), tensor.dtype)
        if kept.setdefault(memory, name) != name:
            tied[name] = kept[memory]
    return {name: tensor for name, tensor in tensors.items() if name not in tied}, tied


def write_tensors(tensors: Mapping[str, torch.Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors as safetensors, without syncing the file. Tied tensors are not supported: each gets its own copy.

    :param metadata: further texts to store in the file, by name
    :raises OSError: if the file cannot be written
    """
    separate: dict[str, torch.Tensor] = {}
    storages = set()
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr()
        is_shared = storage in storages
        separate[name] = tensor.clone(memory_format=torch.contiguous_format) if is_shared else tensor.contiguous()
        storages.add(storage)
    path.touch()
    mode = path.stat().st_mode
    with naming(path):
        safetensors.torch.save_file(separate, path, metadata={"format": "pt"} | dict(metadata or {}))
    path.chmod(mode)  # safetensors creates files that only their owner can read


def open_tensors(path: StrPath) -> tuple[Any, dict[str, str]]:
    """Return an open safetensors file and the texts stored in it. It stays open, and may be removed.

    :raises ValueError: if it is damaged
    """
    try:
        file: Any = safetensors.safe_open(path, framework="pt")
    except safetensors.SafetensorError as error:
        raise ValueError(f"The file {os.fspath(path)!r} is damaged, or no safetensors file. {error}") from error
    return file, file.metadata() or {}


def write_checkpoint(checkpoint: Mapping[str, Any], path: StrPath) -> None:
    """Write a checkpoint atomically: even if the process is killed, ``path`` holds either the old or the new one.

    :raises ValueError: if ``path`` is a URL
    :raises TypeError: if an entry could not be loaded again without running code; names the path to it
    :raises OSError: if it cannot be written; the previous file is left unchanged
    """
    check_is_no_url("path", path)
    content = storable(checkpoint, "checkpoint")
    with replacing(Path(path)) as temporary:
        write_plain(content, temporary)


def read_checkpoint(path: StrPath) -> dict[str, Any]:
    """Read a checkpoint, or weights alone, in a safetensors file or one of torch, onto the CPU, without running code.

    :raises FileNotFoundError: if the file does not exist
    :raises ValueError: if the file is damaged, is not a checkpoint, or holds objects that need code to be rebuilt
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"There is no checkpoint at {os.fspath(path)!r}.")
    if Path(path).suffix == ".safetensors":
        _, metadata = open_tensors(path)
        weights = safetensors.torch.load_file(path)
        return {"model_state_dict": weights, FROZEN: json.loads(metadata.get(FROZEN, "{}"))}
    checkpoint: Any = load_plain(Path(path))
    entries = checkpoint if isinstance(checkpoint, dict) else {}
    if entries and all(isinstance(value, torch.Tensor) for value in entries.values()):
        return {"model_state_dict": checkpoint}  # as saved by torch.save(model.state_dict(), path)
    if "model_state_dict" not in entries:
        raise ValueError(
            f"The file {os.fspath(path)!r} is not a checkpoint: it has no 'model_state_dict'. It holds "
            f"{', '.join(map(repr, entries)) or type(checkpoint).__name__}. Load what you need of it yourself, such as "
            "model.load_state_dict(torch.load(path)['state_dict'])."
        )
    return entries


#: Number of bytes of a file that are hashed at once. Part of the format: another size gives other checksums.
PIECE = 8 << 20
_MOST_THREADS = 8  # hash faster than most disks read


def hash_files(paths: Iterable[Path]) -> dict[str, str]:
    """Return a checksum of each file, by name: the SHA-256 of the SHA-256 of its pieces, computed on all cores.

    :raises OSError: if a file cannot be read
    """
    with ThreadPoolExecutor(min(available_cores(), _MOST_THREADS), "hashing") as pool:
        pieces = {
            path.name: [pool.submit(_hash_piece, path, start) for start in range(0, path.stat().st_size, PIECE)]
            for path in paths
        }
        digests = {name: b"".join(piece.result() for piece in file_pieces) for name, file_pieces in pieces.items()}
    return {name: hashlib.sha256(digest).hexdigest() for name, digest in digests.items()}


def _hash_piece(path: Path, start: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(start)
        return hashlib.sha256(file.read(PIECE)).digest()
