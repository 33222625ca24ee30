"""Writing files so that they are on the disk when the call returns, and reading them without running code."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

StrPath = str | os.PathLike[str]
# What a number of numpy is rebuilt by, which torch does not allow by itself; that needs no code of a file's.
_NUMPY_NUMBERS: list[Any] = [
    np.dtype,
    (np.float64().__reduce__()[0], "numpy.core.multiarray.scalar"),  # as numpy 1 wrote it
    (np.float64().__reduce__()[0], "numpy._core.multiarray.scalar"),
    *{type(np.dtype(code)) for code in "?bhilqBHILQefd"},
]


def sync(path: Path) -> None:
    """Make a file, or the names in a directory, survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Give a path whose file takes the place of another when the block ends, and is removed when it fails."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file's content."""
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def storable(value: Any, path: str) -> Any:
    """Return a value in the types that ``torch.load(weights_only=True)`` rebuilds; numpy's numbers become Python's.

    :param path: what to call the value in the error
    :raises TypeError: when it, or something in it, has no such type; names the path to it
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
    """Write what :func:`load_plain` loads."""
    with open(path, "wb") as file:
        torch.save(value, file)
    sync(path)


def load_plain(path: Path) -> Any:
    """Load what ``torch.save`` wrote, onto the CPU, without running code from the file.

    :raises ValueError: when it cannot be loaded so
    """
    try:
        with torch.serialization.safe_globals(_NUMPY_NUMBERS):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file makes torch raise almost anything
        raise ValueError(
            f"The file {os.fspath(path)!r} cannot be loaded as plain tensors and values: it is damaged, or holds "
            f"objects that only code could rebuild ({type(error).__name__})."
        ) from error


def untie(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return tensors that are tied under one name each, and the other names with the one that was kept."""
    kept: dict[Any, str] = {}
    tied = {}
    for name, tensor in tensors.items():
        start = tensor.untyped_storage().data_ptr(), tensor.storage_offset()
        place = (*start, tensor.shape, tensor.stride(), tensor.dtype)
        if kept.setdefault(place, name) != name:
            tied[name] = kept[place]
    return {name: tensor for name, tensor in tensors.items() if name not in tied}, tied


def write_tensors(tensors: Mapping[str, torch.Tensor], path: Path, tied: Mapping[str, str] | None = None) -> None:
    """Write tensors as safetensors. The format has no tied ones: each name gets its own copy.

    :param tied: further names for some of them, kept in the file's metadata
    :raises OSError: when they cannot be written
    """
    separate: dict[str, torch.Tensor] = {}
    storages = set()
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr()
        separate[name] = tensor.clone() if storage in storages else tensor.contiguous()
        storages.add(storage)
    path.touch()
    mode = path.stat().st_mode
    try:
        safetensors.torch.save_file(separate, path, metadata={"format": "pt"} | dict(tied or {}))
    except safetensors.SafetensorError as error:
        raise OSError(f"The file {os.fspath(path)!r} cannot be written. {error}") from error
    path.chmod(mode)  # safetensors makes files that only their owner can read
    sync(path)


def write_checkpoint(checkpoint: Mapping[str, Any], path: StrPath) -> None:
    """Write a checkpoint so that ``path`` holds the old or the new one whole, whenever the process is killed.

    :raises TypeError: when an entry could not be loaded again without running code; names the path to it
    :raises OSError: when it cannot be written; the previous file is left as it was
    """
    content = storable(checkpoint, "checkpoint")
    with replacing(Path(path)) as temporary:
        write_plain(content, temporary)


def read_checkpoint(path: StrPath) -> dict[str, Any]:
    """Read a checkpoint onto the CPU, without running code from it.

    :raises FileNotFoundError: when there is none
    :raises ValueError: when the file is damaged, is no checkpoint, or holds objects that only code can rebuild
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"There is no checkpoint at {os.fspath(path)!r}.")
    checkpoint = load_plain(Path(path))
    if not isinstance(checkpoint, dict) or "model_state_dict" not in checkpoint:
        raise ValueError(f"The file {os.fspath(path)!r} is no checkpoint: it has no 'model_state_dict'.")
    return checkpoint
