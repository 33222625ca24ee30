"""The files of save_checkpoint(): weights, and what else a program keeps with them."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import safetensors.torch
import torch

from pytorch_accel_lite.base.display import short_repr
from pytorch_accel_lite.base.paths import PathOrFile, check_open_file, local_path, name_of
from pytorch_accel_lite.base.types import StateDict, Tree
from pytorch_accel_lite.checkpoint.disk.atomic_files import naming_file, replacing
from pytorch_accel_lite.checkpoint.disk.checksums import verify, verify_content
from pytorch_accel_lite.checkpoint.disk.safetensors_files import WholeFile, open_tensors
from pytorch_accel_lite.checkpoint.disk.torch_files import load_plain, storable, write_plain

#: The entry of a checkpoint or a state with the checksums of weights that were left out: frozen and quantised ones.
LEFT_OUT = "frozen_weights"


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
            torch.save(content, WholeFile(path))  # type: ignore[arg-type]  # has what torch needs of a file
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
        return checkpoint_of(weights, metadata)
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
        return checkpoint_of(weights, metadata)
    verify_content(content, name, is_safetensors=False)
    if zipfile.is_zipfile(io.BytesIO(content)):
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            if min((record.header_offset for record in archive.infolist()), default=0):  # torch would mix them up
                raise ValueError(
                    f"The last checkpoint in the file {name!r} does not begin at its position. Call seek() with the "
                    "position at which it was written, and keep other checkpoints in files of their own."
                )
    return _entries_of(load_plain(io.BytesIO(content), name=name), name)


def checkpoint_of(weights: StateDict, metadata: Mapping[str, str]) -> StateDict:
    """Return weights as the content of a checkpoint, given the metadata of their safetensors file."""
    return {"model_state_dict": weights, LEFT_OUT: json.loads(metadata.get(LEFT_OUT, "{}"))}


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
    for entry in ("model_state_dict", "loss_func_state_dict", "attribute_state_dicts", LEFT_OUT):
        held = entries.get(entry, {})
        if not isinstance(held, dict) or not all(isinstance(key, str) for key in held):
            raise ValueError(
                f"The file {name!r} is not a checkpoint of save_checkpoint(): its {entry!r} is not a dict with names, "
                f"but {short_repr(held)}. Load what you need of it yourself."
            )
    return entries
