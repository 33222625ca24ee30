"""Sharded tensors in files, of which each process writes and reads its own part; tensors from all files of a state.

The files have the format of torch's distributed checkpoints in safetensors (``HuggingFaceStorageWriter``), which its
``HuggingFaceStorageReader`` reads, too. Files of unsharded tensors, such as those of pretrained models, are read as
well. Nothing is gathered, and nothing but safetensors is read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from pytorch_accel_lite.checkpoint.disk.safetensors_files import open_tensors, write_tensors
from pytorch_accel_lite.distributed.shard_holders import current_holders

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_INFO = "DCP_SHARDING_INFO"
_VERSION = "DCP_VERSION"
_OFFSETS = "saved_offsets"
#: For each tensor by name, the offsets of this process's part, and the part.
Parts = dict[str, tuple[tuple[int, ...], torch.Tensor]]


def is_sharded_tensor(value: object) -> TypeGuard[DTensor]:
    """Whether a value is a tensor divided among the processes."""
    return hasattr(value, "full_tensor")


def local_parts(tensors: Mapping[str, DTensor]) -> Parts:
    """Return the parts of sharded tensors that this process writes. Of several copies, only the first is written.

    Call it on every process.
    """
    left = current_holders()
    holders = None if left is None else left.positions
    parts: Parts = {}
    for name, sharded in tensors.items():
        tensor = _with_one_part(sharded)
        start, shape = _bounds(tensor)
        coordinate = tuple(tensor.device_mesh.get_coordinate() or ())
        if 0 not in shape and coordinate == first_holder(tensor, coordinate, holders):
            parts[name] = start, tensor.to_local().detach()
    return parts


def gather_tensor(tensor: DTensor) -> torch.Tensor:
    """Return a whole tensor, from the shards of all processes. Call it on every process."""
    left = current_holders()
    if left is None:
        return tensor.full_tensor()
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    for parts in left.ranks.all_gather_object(local_parts({"": tensor})):
        for start, part in parts.values():
            whole[tuple(slice(first, first + size) for first, size in zip(start, part.shape, strict=True))] = part
    return whole


def first_holder(tensor: DTensor, coordinate: Sequence[int], holders: Collection[int] | None) -> tuple[int, ...] | None:
    """Return the coordinates in the mesh of the first of the processes that hold the same part as one of them."""
    positions = tensor.device_mesh.mesh
    choices = [
        range(size) if placement.is_replicate() else (index,)
        for placement, index, size in zip(tensor.placements, coordinate, positions.shape, strict=True)
    ]
    copies = product(*choices)
    return next((copy for copy in copies if holders is None or int(positions[copy]) in holders), None)


def _with_one_part(tensor: DTensor) -> DTensor:
    """Return a sharded tensor laid out so that each process holds one contiguous part. May communicate.

    With ``fully_shard`` over a tensor-parallel dimension, processes hold several parts.
    """
    from torch.distributed.tensor import Shard

    placements: Sequence[Any] = tensor.placements
    strided = [type(placement).__name__ == "_StridedShard" for placement in placements]
    if not any(strided):
        return tensor
    pairs = zip(placements, strided, strict=True)
    return tensor.redistribute(placements=[Shard(p.dim) if is_strided else p for p, is_strided in pairs])


def _bounds(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the offsets and the shape of this process's part of a sharded tensor."""
    shape = tuple(tensor.to_local().shape)
    # The protocol of torch.distributed.checkpoint.
    chunks = tensor.__create_chunk_list__() if 0 not in shape else []  # type: ignore[no-untyped-call]
    return tuple(chunks[0].offsets) if chunks else (0,) * len(shape), shape


def write_parts(parts: Parts, path: Path) -> None:
    """Write the parts of tensors that this process holds, without syncing the file.

    Raises:
        OSError: if the file cannot be written
    """
    info = {name: {_OFFSETS: list(start)} for name, (start, _) in parts.items()}
    tensors = {name: tensor for name, (_, tensor) in parts.items()}
    write_tensors(tensors, path, {_INFO: json.dumps(info), _VERSION: "1.0"})


@dataclass(eq=False, repr=False)
class StoredTensor:
    """A tensor in open files, in one or several parts.

    Attributes:
        name: the name of the tensor in the state
        parts: the offsets, the shape and the file of each part
    """

    name: str
    parts: list[tuple[tuple[int, ...], tuple[int, ...], Any]] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the full tensor."""
        ends = [tuple(a + size for a, size in zip(start, sizes, strict=True)) for start, sizes, _ in self.parts]
        return tuple(map(max, zip(*ends, strict=True)))

    @property
    def dtype(self) -> torch.dtype:
        """The type of the elements."""
        file = self.parts[0][2]
        sample = file.get_slice(self.name)[:0] if self.shape else file.get_tensor(self.name)
        return sample.dtype  # type: ignore[no-any-return]

    def read(self, like: torch.Tensor | None = None) -> torch.Tensor:
        """Read the tensor, sharded like another tensor of the same shape: each process reads only its own part.

        If the other tensor is not sharded or has another shape, the full tensor is read. May communicate.
        """
        if not is_sharded_tensor(like) or tuple(like.shape) != self.shape:
            return self._read_part((0,) * len(self.shape), self.shape)
        from torch.distributed.tensor import DTensor

        empty: Any = torch.empty_like(like, dtype=self.dtype)
        target = _with_one_part(empty)
        part = self._read_part(*_bounds(target)).to(like.device)
        tensor = DTensor.from_local(part, like.device_mesh, target.placements, shape=like.shape, stride=like.stride())
        return tensor if tensor.placements == like.placements else tensor.redistribute(placements=like.placements)

    def _read_part(self, start: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        """Read a part of the tensor.

        Raises:
            ValueError: if the files lack some of it
        """
        for begin, sizes, file in self.parts:
            if (begin, sizes) == (start, shape):
                mapped: torch.Tensor = file.get_tensor(self.name)
                return mapped.clone()  # the memory mapping ends with the file
        result, missing = torch.empty(shape, dtype=self.dtype), math.prod(shape)
        for begin, sizes, file in self.parts:
            first = [max(a, b) for a, b in zip(start, begin, strict=True)]
            last = [min(a + n, b + m) for a, n, b, m in zip(start, shape, begin, sizes, strict=True)]
            if all(a < b for a, b in zip(first, last, strict=True)):
                source = tuple(slice(a - o, b - o) for a, b, o in zip(first, last, begin, strict=True))
                target = tuple(slice(a - o, b - o) for a, b, o in zip(first, last, start, strict=True))
                result[target] = file.get_slice(self.name)[source]
                missing -= result[target].numel()
        if missing > 0:
            raise ValueError(f"The files lack {missing} of {math.prod(shape)} elements of {self.name}. Is one missing?")
        return result


def find_tensors(paths: Iterable[Path]) -> dict[str, StoredTensor]:
    """Return the tensors in safetensors files, by name. The files stay open; they may be removed from the disk.

    Raises:
        ValueError: if a file is damaged
    """
    stored: dict[str, StoredTensor] = {}
    for path in paths:
        file, metadata = open_tensors(path)
        info = json.loads(metadata.get(_INFO, "{}"))
        for name in file.keys():  # noqa: SIM118
            shape = tuple(file.get_slice(name).get_shape())
            start = tuple(info[name][_OFFSETS]) if name in info else (0,) * len(shape)
            stored.setdefault(name, StoredTensor(name)).parts.append((start, shape, file))
    return stored
