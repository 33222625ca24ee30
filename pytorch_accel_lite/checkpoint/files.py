"""Writing files so that they are on the disk when the call returns, and reading them back without running code."""

from __future__ import annotations

import hashlib
import os
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch


@contextmanager
def durable_file(path: Path) -> Iterator[BinaryIO]:
    """Open a new file to write; it is synced to the disk when the block ends."""
    with open(path, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Make the names in a directory, created and renamed ones, survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file's content."""
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def storable(value: Any, path: str) -> Any:
    """Return a value in the types that ``torch.load(weights_only=True)`` rebuilds.

    Numbers of numpy become Python's.

    :param path: what to call the value in the error
    :raises TypeError: when it, or something in it, has no such type; names the path to it
    """
    if isinstance(value, (torch.Tensor, str, bytes)) or value is None or type(value) in (bool, int, float, complex):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in (dict, OrderedDict) or isinstance(value, Mapping):
        converted = {storable(k, f"{path}.keys()"): storable(v, f"{path}[{k!r}]") for k, v in value.items()}
        return type(value)(converted) if isinstance(value, (OrderedDict, Counter)) else converted
    if type(value) in (list, tuple, set):
        return type(value)(storable(item, f"{path}[{i}]") for i, item in enumerate(value))
    raise TypeError(
        f"{path} is {type(value).__name__}, which cannot be stored without pickle. Store numbers, strings, tensors, "
        "and lists, tuples, sets or dicts of them."
    )


def load_plain(path: Path) -> Any:
    """Load what ``torch.save`` wrote, onto the CPU, without running code from the file.

    :raises ValueError: when it cannot be loaded so
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file makes torch raise almost anything
        raise ValueError(
            f"The file {os.fspath(path)!r} cannot be loaded as plain tensors and values: it is damaged, or holds "
            f"objects that only code could rebuild ({type(error).__name__})."
        ) from error
