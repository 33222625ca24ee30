"""Objects as bytes for other processes: tensors are copied as they are, everything else is pickled."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

_ALIGNMENT = 64
#: Two integers at the front of a message: one that is the sender's own, and the number of bytes pickled.
_HEADER = 16


class Message(pickle.Pickler):
    """An object that can be written to bytes.

    :param of_all_tensors: copy tensors on a device and those with gradients as well, which then arrive on the CPU and
        without; by default these are pickled, and arrive as they were
    :ivar size: number of bytes
    """

    def __init__(self, value: Any, of_all_tensors: bool = False) -> None:
        self._of_all_tensors = of_all_tensors
        self._file = io.BytesIO()
        self._tensors: list[tuple[int, torch.Tensor]] = []
        self._ids: dict[int, tuple[int, torch.dtype, tuple[int, ...]]] = {}
        self._size_of_tensors = 0
        super().__init__(self._file, protocol=pickle.HIGHEST_PROTOCOL)
        self.dump(value)
        self._first = _aligned(_HEADER + self._file.tell())
        self.size = self._first + self._size_of_tensors

    def persistent_id(self, obj: Any) -> Any:
        """Return the place, type and shape of a tensor that is left out of what is pickled."""
        if type(obj) is not torch.Tensor or not _is_dense(obj):
            return None
        if not self._of_all_tensors and (obj.requires_grad or obj.device.type != "cpu"):
            return None
        if id(obj) not in self._ids:
            self._ids[id(obj)] = self._size_of_tensors, obj.dtype, tuple(obj.shape)
            self._tensors.append((self._size_of_tensors, obj))
            self._size_of_tensors += _aligned(obj.nbytes)
        return self._ids[id(obj)]

    def write(self, buffer: torch.Tensor) -> None:
        """Write the bytes to the front of a buffer, except for the number of :func:`write_number`."""
        pickled = self._file.getvalue()
        buffer[8:_HEADER].view(torch.int64).fill_(len(pickled))
        buffer[_HEADER : _HEADER + len(pickled)].copy_(torch.frombuffer(bytearray(pickled), dtype=torch.uint8))
        for place, tensor in self._tensors:
            _tensor_at(buffer, self._first + place, tensor.dtype, tensor.shape).copy_(tensor.detach())


class _Reader(pickle.Unpickler):
    def __init__(self, buffer: torch.Tensor, keeps: bool) -> None:
        end = _HEADER + int(buffer[8:_HEADER].view(torch.int64).item())
        self._buffer = buffer
        self._keeps = keeps
        self._first = _aligned(end)
        super().__init__(io.BytesIO(buffer[_HEADER:end].numpy().tobytes()))

    def persistent_load(self, pid: Any) -> torch.Tensor:
        place, dtype, shape = pid
        tensor = _tensor_at(self._buffer, self._first + place, dtype, shape)
        return tensor if self._keeps or 2 * tensor.nbytes >= len(self._buffer) else tensor.clone()


def write_number(buffer: torch.Tensor, number: int) -> None:
    """Write the number that a message has at its front."""
    buffer[:8].view(torch.int64).fill_(number)


def read_message(buffer: torch.Tensor, keeps: bool = False) -> tuple[int, Any]:
    """Return the number at the front of a message, and the object.

    :param keeps: let all tensors be views of the buffer; by default, no more than twice their own memory is kept alive
    """
    return int(buffer[:8].view(torch.int64).item()), _Reader(buffer, keeps).load()


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized


def _tensor_at(buffer: torch.Tensor, begin: int, dtype: torch.dtype, shape: Any) -> torch.Tensor:
    size = dtype.itemsize
    for length in shape:
        size *= length
    return buffer[begin : begin + size].view(dtype).view(shape)
