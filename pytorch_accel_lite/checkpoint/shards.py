"""Tensors in pieces: each process writes its own shards to a safetensors file, and reads those it needs from any files.

The files have the form of torch's distributed checkpoints in safetensors (``HuggingFaceStorageWriter``), which its
``HuggingFaceStorageReader`` reads, too. Files of whole tensors, such as those of pretrained models, are read as well.
Nothing is gathered, and nothing but safetensors is read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import torch

from pytorch_accel_lite.checkpoint.files import write_tensors

_INFO = "DCP_SHARDING_INFO"
_VERSION = "DCP_VERSION"
_OFFSETS = "saved_offsets"


class Piece(NamedTuple):
    """A part of a tensor in an open file: where it begins in each dimension, and its sizes."""

    path: Path
    file: Any
    start: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype


#: For each tensor, where this process's part of it begins, and that part.
OwnPieces = dict[str, tuple[tuple[int, ...], torch.Tensor]]


def as_pieces(tensor: Any) -> Any:
    """Return a sharded tensor such that each process holds one contiguous piece of it. May communicate.

    ``fully_shard`` over a tensor-parallel dimension leaves several.
    """
    from torch.distributed.tensor import Shard

    placements = [Shard(place.dim) if _is_strided(place) else place for place in tensor.placements]
    if placements == list(tensor.placements):
        return tensor
    return tensor.redistribute(placements=placements)


def _is_strided(placement: Any) -> bool:
    return type(placement).__name__ == "_StridedShard"


def own_pieces(tensors: Mapping[str, Any]) -> OwnPieces:
    """Return the parts of sharded tensors that this process writes; a part that several hold, only the first writes.

    Call it on every process.
    """
    own: OwnPieces = {}
    for name, sharded in tensors.items():
        tensor = as_pieces(sharded)
        start, shape = _place(tensor)
        here = tensor.device_mesh.get_coordinate()
        repeats = any(place.is_replicate() and here[dim] for dim, place in enumerate(tensor.placements))
        if 0 not in shape and not repeats:
            own[name] = start, tensor.to_local().detach()
    return own


def write_pieces(pieces: OwnPieces, path: Path) -> None:
    """Write the parts of tensors that this process holds, without syncing the file.

    :raises OSError: if the file cannot be written
    """
    info = {name: {_OFFSETS: list(start)} for name, (start, _) in pieces.items()}
    tensors = {name: tensor for name, (_, tensor) in pieces.items()}
    write_tensors(tensors, path, {_INFO: json.dumps(info), _VERSION: "1.0"}, synced=False)


def _place(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return where this process's piece of a sharded tensor begins, and its sizes."""
    shape = tuple(tensor.to_local().shape)
    chunks = tensor.__create_chunk_list__() if 0 not in shape else []  # the protocol of torch.distributed.checkpoint
    return tuple(chunks[0].offsets) if chunks else (0,) * len(shape), shape


def find_pieces(paths: Iterable[Path]) -> dict[str, list[Piece]]:
    """Return the pieces in safetensors files, by the names of the tensors. The files stay open, and may be removed.

    :raises ValueError: if a file is damaged
    """
    result: dict[str, list[Piece]] = {}
    for path in paths:
        try:
            file: Any = safetensors.safe_open(path, framework="pt")
        except safetensors.SafetensorError as error:
            raise ValueError(f"The file {os.fspath(path)!r} is damaged, or no safetensors file. {error}") from error
        info = json.loads((file.metadata() or {}).get(_INFO, "{}"))
        for name in file.keys():  # noqa: SIM118
            part = file.get_slice(name)
            shape = tuple(part.get_shape())
            start = tuple(info[name][_OFFSETS]) if name in info else (0,) * len(shape)
            result.setdefault(name, []).append(Piece(path, file, start, shape, _DTYPES[part.get_dtype()]))
    return result


def shape_of(pieces: Iterable[Piece]) -> tuple[int, ...]:
    """Return the shape of a tensor from its pieces."""
    ends = [tuple(a + b for a, b in zip(piece.start, piece.shape, strict=True)) for piece in pieces]
    return tuple(map(max, zip(*ends, strict=True)))


def read_whole(pieces: list[Piece], name: str) -> torch.Tensor:
    """Read a whole tensor from its pieces."""
    shape = shape_of(pieces)
    return _read(pieces, name, (0,) * len(shape), shape)


def read_like(pieces: list[Piece], like: Any, name: str) -> Any:
    """Read a tensor, sharded like another one of its shape: each process reads only its own piece. May communicate.

    :raises ValueError: if it has another shape
    """
    shape = shape_of(pieces)
    if shape != tuple(like.shape):
        raise ValueError(f"{name} has the shape {shape} in {str(pieces[0].path)!r}, and {tuple(like.shape)} here.")
    if not hasattr(like, "device_mesh"):
        return read_whole(pieces, name).to(like.device)
    from torch.distributed.tensor import DTensor

    target = as_pieces(torch.empty_like(like, dtype=pieces[0].dtype))
    own = _read(pieces, name, *_place(target)).to(like.device)
    made = DTensor.from_local(own, like.device_mesh, target.placements, shape=like.shape, stride=like.stride())
    return made if made.placements == like.placements else made.redistribute(placements=like.placements)


def _read(pieces: list[Piece], name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    """Read a part of a tensor."""
    for piece in pieces:
        if (piece.start, piece.shape) == (start, shape):
            mapped: torch.Tensor = piece.file.get_tensor(name)
            return mapped.clone()  # its pages would be lost with the file
    result = torch.empty(shape, dtype=pieces[0].dtype)
    for piece in pieces:
        first = [max(a, b) for a, b in zip(start, piece.start, strict=True)]
        ends = zip(start, shape, piece.start, piece.shape, strict=True)
        last = [min(a + size, b + length) for a, size, b, length in ends]
        if all(a < b for a, b in zip(first, last, strict=True)):
            there = tuple(slice(a - o, b - o) for a, b, o in zip(first, last, piece.start, strict=True))
            here = tuple(slice(a - o, b - o) for a, b, o in zip(first, last, start, strict=True))
            result[here] = piece.file.get_slice(name)[there] if there else piece.file.get_tensor(name)
    return result


#: The types of tensors in safetensors files, by their names there.
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
}  # fmt: skip
#: The types of tensors that can be written and read in pieces.
READABLE = frozenset(_DTYPES.values())
