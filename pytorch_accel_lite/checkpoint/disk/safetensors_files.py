"""Files of tensors in the format safetensors, with a checksum inside."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import safetensors.torch
import torch

from pytorch_accel_lite.base.nested_values import is_dense
from pytorch_accel_lite.base.paths import StrPath, name_of
from pytorch_accel_lite.base.types import Tree
from pytorch_accel_lite.checkpoint.disk.atomic_files import naming_file
from pytorch_accel_lite.checkpoint.disk.checksums import UNSEALED, sealed


def untie(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return tensors in which tied tensors have a single name, and a dict from their other names to that name."""
    _check_are_tensors(tensors)
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
    whole = WholeFile(file)
    with naming_file(name_of(file)):
        whole.write(sealed(content))
        whole.flush()


def _check_are_tensors(tensors: Mapping[str, object]) -> None:
    for name, value in tensors.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"{name!r} is {type(value).__name__}, perhaps a module's get_extra_state(), but safetensors files hold "
                "only tensors. Save the model with save_checkpoint(), or leave it out of the module's state."
            )


def _separate(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return contiguous tensors that share no memory."""
    _check_are_tensors(tensors)
    separate: dict[str, torch.Tensor] = {}
    storages = set()
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr()
        is_shared = storage in storages
        separate[name] = tensor.clone(memory_format=torch.contiguous_format) if is_shared else tensor.contiguous()
        storages.add(storage)
    return separate


class WholeFile:
    """An open file that writes all data it is given: a file without a buffer may take less at a time."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file

    def write(self, data: bytes | memoryview) -> int:
        """Write all of the data."""
        rest = memoryview(data)
        while rest:
            taken = self.file.write(rest)
            rest = rest[len(rest) if taken is None else taken :]  # some files do not report how much they took
        return len(data)

    def flush(self) -> None:
        """Flush the file, if it can be flushed."""
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


def fits_safetensors(value: Tree) -> bool:
    """Whether safetensors supports a value, unlike, for example, a sparse tensor."""
    return isinstance(value, torch.Tensor) and is_dense(value) and value.dtype != torch.complex128
