"""Encoding objects as bytes for other processes: tensors are copied, everything else is pickled.

Pickle would restore the tensors of a GPU on the sender's GPU, and a process would hold memory of all the others. So
messages have copies, which are decoded on the CPU.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from pytorch_accel_lite.base.machine import await_processes
from pytorch_accel_lite.base.nested_values import is_dense

#: Unpickling a sparse tensor puts it on a private list of torch's, which keeps the tensor until it is validated.
_release_sparse_tensors: Callable[[], None] = getattr(torch._utils, "_validate_loaded_sparse_tensors", lambda: None)  # noqa: SLF001
#: A tensor in the pickled part of a message: the offset of its bytes, its type and its shape.
_TensorKey: TypeAlias = tuple[int, torch.dtype, tuple[int, ...]]
_ALIGNMENT = 64  # bytes
_HEADER = 16  # bytes at the front of a message: the size of the pickled part, and whether tensors were on a device
_KEEP_DEVICE = ("cpu", "meta")  # tensors of "meta" have no values to copy


class Message(pickle.Pickler):
    """An object that can be encoded as bytes. Only the elements of a view are encoded, not its entire storage.

    Args:
        value: the object to encode

    Attributes:
        size: number of bytes
    """

    def __init__(self, value: object) -> None:
        self._file = io.BytesIO()
        self._tensors: dict[int, tuple[int, torch.Tensor]] = {}
        self._size_of_tensors = 0
        self._leaves_device = False
        super().__init__(self._file, protocol=pickle.HIGHEST_PROTOCOL)
        self.dump(value)
        self._first = _aligned(_HEADER + self._file.tell())
        self.size = self._first + self._size_of_tensors

    def persistent_id(self, obj: object) -> _TensorKey | None:
        """Return the offset, type and shape of a tensor, which is not pickled."""
        if isinstance(obj, torch.Tensor):
            obj = await_processes(obj)
        if type(obj) is not torch.Tensor or not is_dense(obj) or obj.requires_grad:
            return None
        self._leaves_device |= obj.device.type not in _KEEP_DEVICE
        if id(obj) not in self._tensors:
            self._tensors[id(obj)] = self._size_of_tensors, obj
            self._size_of_tensors += _aligned(obj.nbytes)
        return self._tensors[id(obj)][0], obj.dtype, tuple(obj.shape)

    def reducer_override(self, obj: object) -> Any:
        """Pickle the storage of a tensor that ``persistent_id`` leaves out as a copy on the CPU."""
        if not isinstance(obj, torch.TypedStorage):
            return NotImplemented
        storage = obj._untyped_storage  # noqa: SLF001 - the public ways to a storage's device warn
        if storage.device.type in _KEEP_DEVICE:
            return NotImplemented
        self._leaves_device = True
        on_cpu = storage.cpu()  # type: ignore[no-untyped-call]
        copy = torch.TypedStorage(wrap_storage=on_cpu, dtype=obj.dtype, _internal=True)  # type: ignore[no-untyped-call]
        return copy.__reduce_ex__(pickle.HIGHEST_PROTOCOL)

    def write(self, buffer: torch.Tensor) -> None:
        """Write the bytes to the front of a buffer."""
        pickled = self._file.getvalue()
        buffer[:_HEADER].view(torch.int64).copy_(torch.tensor([len(pickled), self._leaves_device]))
        buffer[_HEADER : _HEADER + len(pickled)].copy_(torch.frombuffer(bytearray(pickled), dtype=torch.uint8))
        for offset, tensor in self._tensors.values():
            _tensor_at(buffer, self._first + offset, tensor.dtype, tensor.shape).copy_(tensor)


class _Reader(pickle.Unpickler):
    def __init__(self, buffer: torch.Tensor) -> None:
        end = _HEADER + int(buffer[:_HEADER].view(torch.int64)[0].item())
        self._buffer = buffer
        self._first = _aligned(end)
        super().__init__(io.BytesIO(buffer[_HEADER:end].numpy().tobytes()))

    def persistent_load(self, pid: _TensorKey) -> torch.Tensor:
        offset, dtype, shape = pid
        tensor = _tensor_at(self._buffer, self._first + offset, dtype, shape)
        return tensor if 2 * tensor.nbytes >= len(self._buffer) else tensor.clone()


def encode(value: object) -> torch.Tensor:
    """Return a picklable value as bytes."""
    message = Message(value)
    encoded = torch.empty(message.size, dtype=torch.uint8)
    message.write(encoded)
    return encoded


def leaves_device(buffer: torch.Tensor) -> bool:
    """Whether a message has copies of tensors of a device, so that its value differs from the one encoded."""
    return bool(buffer[:_HEADER].view(torch.int64)[1].item())


def decode(buffer: torch.Tensor) -> Any:
    """Return the object of a message. Its tensors keep no more than twice their own memory alive."""
    value = _Reader(buffer).load()
    _release_sparse_tensors()
    return value


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _tensor_at(buffer: torch.Tensor, begin: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    end = begin + math.prod(shape) * dtype.itemsize
    return buffer[begin:end].view(dtype).view(shape)
