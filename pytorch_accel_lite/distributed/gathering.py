"""Gathering nested outputs from all processes: the contents of tensors as they are, everything else pickled."""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Sequence
from typing import Any

import torch

from pytorch_accel_lite.distributed.ranks import Ranks

_Place = tuple[torch.dtype, tuple[int, ...], int]
_ALIGNMENT = 16  # bytes: that of the widest element, a complex number


def gather_outputs(
    ranks: Ranks, mine: Any, numbers: Sequence[int], only_first: bool = False
) -> tuple[list[list[int]], list[Any]]:
    """Return the numbers and the nested outputs of all ranks, in rank order.

    Received tensors are views of a buffer. They are sent from the CPU, without their gradients.

    :param numbers: as many on every rank; returned with the number of bytes sent appended
    :param only_first: return the outputs on the first rank only, and an empty list on the others
    """
    is_sent = not (only_first and ranks.rank == 0)
    message, num_pickled = _pack(mine) if is_sent else (torch.empty(0, dtype=torch.uint8), 0)
    given = ranks.all_gather_numbers([num_pickled, *numbers, len(message)])
    received = ranks.all_gather_bytes(message, [of_rank[-1] for of_rank in given], only_first)
    outputs = [mine if rank == ranks.rank else _unpack(buffer, given[rank][0]) for rank, buffer in enumerate(received)]
    return [of_rank[1:] for of_rank in given], outputs


class _Packer(pickle.Pickler):
    """Pickles an object without the contents of its dense tensors, which it collects.

    :ivar tensors: the tensors, each with its place: type, shape, and first byte
    :ivar size: number of bytes that they take
    """

    def __init__(self, file: Any) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[tuple[_Place, torch.Tensor]] = []
        self.size = 0

    def persistent_id(self, value: Any) -> _Place | None:
        if type(value) is not torch.Tensor or value.layout is not torch.strided or value.is_quantized:
            return None
        place = value.dtype, tuple(value.shape), self.size
        self.tensors.append((place, value))
        self.size += -(-value.numel() * value.element_size() // _ALIGNMENT) * _ALIGNMENT
        return place


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: Any, message: torch.Tensor) -> None:
        super().__init__(file)
        self._message = message

    def persistent_load(self, place: _Place) -> torch.Tensor:
        return _at(place, self._message)


def _at(place: _Place, message: torch.Tensor) -> torch.Tensor:
    """Return the tensor at a place in a message, as a view."""
    dtype, shape, begin = place
    return message[begin : begin + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


def _pack(value: Any) -> tuple[torch.Tensor, int]:
    """Return an object as bytes, with the number of those, at the end, that are pickled."""
    file = io.BytesIO()
    packer = _Packer(file)
    packer.dump(value)
    pickled = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
    message = torch.empty(packer.size + len(pickled), dtype=torch.uint8)
    for place, tensor in packer.tensors:
        _at(place, message).copy_(tensor.detach())
    message[packer.size :] = pickled
    return message, len(pickled)


def _unpack(message: torch.Tensor, num_pickled: int) -> Any:
    pickled = message[len(message) - num_pickled :].numpy().tobytes()
    return _Unpacker(io.BytesIO(pickled), message).load()
