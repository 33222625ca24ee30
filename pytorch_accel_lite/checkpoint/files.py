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
import time
import warnings
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
import safetensors.torch
import torch

from pytorch_accel_lite.base.environment import available_cores

_SECONDS_UNTIL_LEFT = 600  # a process that is still writing a temporary file has changed it more recently
StrPath = str | os.PathLike[str]
#: The entry of a file for the fingerprints of weights that were left out of it.
FROZEN = "frozen_weights"
# Needed to load numpy numbers, and not allowed by torch by default; they run no code from a file.
_NUMPY_NUMBERS: list[Any] = [
    np.dtype,
    (np.float64().__reduce__()[0], "numpy.core.multiarray.scalar"),  # as numpy 1 wrote it
    (np.float64().__reduce__()[0], "numpy._core.multiarray.scalar"),
    *{type(np.dtype(code)) for code in "?bhilqBHILQefd"},
]


def parse_location(path: StrPath) -> Path | str:
    """Return a path as a ``Path``, and the URL of a folder in a remote store as text without a final slash."""
    text = os.fspath(path)
    scheme, separator, rest = text.partition("://")
    if not separator:
        return Path(path)
    return Path(rest) if scheme in ("file", "local") else text.rstrip("/")


def sync(path: Path) -> None:
    """Flush a file, or the entries of a directory, to disk, so that it survives a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a directory and what is in it, or a file, or a link but not what it points to; errors are ignored."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let what the system refuses while a file is written, on a full disk for example, be an ``OSError`` that names it.

    torch and safetensors raise errors of their own instead, and Python's name no file once it is open.
    """
    try:
        yield
    except (OSError, RuntimeError, safetensors.SafetensorError) as error:
        number = _error_number(error)
        if number is None:
            raise
        raise OSError(number, os.strerror(number), os.fspath(path)) from error


def _error_number(error: BaseException | None) -> int | None:
    """Return the system's number of the error that led to this one; ``None`` if there was none."""
    if isinstance(error, safetensors.SafetensorError):
        match = re.search(r"(?:os error|code:) (\d+)", str(error))
        return int(match[1]) if match else errno.EIO
    while isinstance(error, RuntimeError):
        error = error.__context__
    return error.errno if isinstance(error, OSError) else None


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a temporary path that is synced and replaces ``target``, or is removed when the block fails."""
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_remains(target)
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
    """Lock an open file until it is closed, and return whether no other process has it; warn if that is unknown."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not inherited by forked workers
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        warnings.warn(
            f"{os.fspath(file.name)!r} cannot be locked, as its disk has no file locks ({error.strerror}). The run "
            "continues without a lock: do not let another run write to the same folder.",
            stacklevel=2,
        )
    return True


def _remove_remains(target: Path) -> None:
    """Remove what processes that were killed while they wrote a file have left beside it."""
    name = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{8}}\.tmp")
    for path in target.parent.iterdir():
        if name.fullmatch(path.name):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > _SECONDS_UNTIL_LEFT:
                    path.unlink()


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file's content as a hexadecimal string, as states of format 1 have it."""
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def storable(value: Any, path: str) -> Any:
    """Convert a value to types that ``torch.load(weights_only=True)`` can load; numpy numbers become Python numbers.

    :param path: name of the value in the error
    :raises TypeError: if the value, or one nested in it, cannot be converted; names the path to it
    """
    if isinstance(value, (torch.Tensor, str, bytes)) or value is None or type(value) in (bool, int, float, complex):
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
        again = storage in storages
        separate[name] = tensor.clone(memory_format=torch.contiguous_format) if again else tensor.contiguous()
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

    :raises TypeError: if an entry could not be loaded again without running code; names the path to it
    :raises OSError: if it cannot be written; the previous file is left unchanged
    """
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


#: Bytes of a file that are hashed at once. Part of the format: another size gives other checksums.
PIECE = 8 << 20
_MOST_THREADS = 8  # hash faster than most disks read


def hash_files(paths: Iterable[Path]) -> dict[str, str]:
    """Return a checksum of each file, by its name: the SHA-256 of those of its pieces, which all cores compute.

    :raises OSError: if a file cannot be read
    """
    with ThreadPoolExecutor(min(available_cores(), _MOST_THREADS), "hashing") as pool:
        pieces = {
            path.name: [pool.submit(_hash_piece, path, start) for start in range(0, path.stat().st_size, PIECE)]
            for path in paths
        }
        digests = {name: b"".join(piece.result() for piece in of_file) for name, of_file in pieces.items()}
    return {name: hashlib.sha256(digest).hexdigest() for name, digest in digests.items()}


def _hash_piece(path: Path, start: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(start)
        return hashlib.sha256(file.read(PIECE)).digest()
