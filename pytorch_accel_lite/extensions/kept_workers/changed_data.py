"""Noticing that objects, or their contents at any depth, have changed."""

from __future__ import annotations

import marshal
from array import array
from collections import deque
from collections.abc import Iterable
from itertools import chain
from types import ModuleType
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader

from pytorch_accel_lite.extension_tools.data_and_batches import Marks, is_a, is_dense, parts_held

_PLAIN = (str, bytes, int, float, complex, bool, type(None))
_LISTS = (list, tuple, set, frozenset, deque)
#: The most that is compared: objects, elements of lists and dicts, bytes. It takes about as long to start workers.
_MOST_OBJECTS, _MOST_ELEMENTS, _MOST_BYTES = 1 << 14, 1 << 22, 1 << 29
_CHUNK = 1 << 12  # elements of a list that are compared at once


def marks_of(roots: Iterable[object]) -> Marks:
    """Return marks that differ if objects, or their contents, have changed; reads nothing from a device.

    Marks cover the attributes of objects at any depth, and the objects that functions use: numbers, names, the contents
    of tensors and arrays, and elements of lists and dicts. If there is more than can be compared in about half a
    second, marks always differ.
    """
    try:
        return _Search(roots).marks
    except _TooMuchError:
        return [object()]


class _TooMuchError(Exception):
    """There is more than can be compared soon."""


class _Identity:
    """The mark of an object whose contents cannot be compared, which no other object has, not even a later one."""

    def __init__(self, item: object) -> None:
        self.item = item

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.item is self.item

    __hash__ = None  # type: ignore[assignment]


class _Search:
    """Collects the marks of objects, and of all that they hold.

    Args:
        roots: where to begin

    Raises:
        _TooMuchError: if there is more than the limits
    """

    def __init__(self, roots: Iterable[object]) -> None:
        self.marks: Marks = []
        self._left = [*roots]
        self._elements = self._bytes = 0
        seen: dict[int, object] = {}
        while self._left:
            item = self._left.pop()
            if is_a(item, *_PLAIN):
                self.marks.append((type(item), item))
            elif id(item) not in seen:
                seen[id(item)] = item
                self._check_limit(len(seen), _MOST_OBJECTS)
                self.marks += type(item), self._mark(item)

    def _check_limit(self, number: int, limit: int) -> None:
        if number > limit:
            raise _TooMuchError

    def _mark(self, item: object) -> object:
        """Return the mark of an object itself, and note what it holds as left to be searched."""
        if is_a(item, torch.Tensor):
            return self._mark_of_tensor(item)
        if is_a(item, np.ma.MaskedArray):
            mask = np.ma.getmaskarray(item)
            return self._mark_of_array(np.asarray(item)), self._mark_of_array(mask, compares_address=False)
        if is_a(item, np.ndarray, np.generic):
            return self._mark_of_array(np.asarray(item))
        if is_a(item, ModuleType, type, DataLoader):
            return _Identity(item)
        if is_a(item, *_LISTS):
            return self._mark_of_elements([*item])
        if is_a(item, dict):
            return self._mark_of_elements([*chain(item, item.values())])
        if is_a(item, bytearray, array):
            return self._mark_of_array(np.frombuffer(item, np.uint8) if item else np.empty(0))  # type: ignore[call-overload]
        if hasattr(type(item), "iloc"):
            return self._mark_of_table(item)
        parts = parts_held(item)
        self._left += parts
        return None if parts else _Identity(item)

    def _mark_of_table(self, table: Any) -> object:
        """Return the mark of a data frame or a series."""
        columns = [table] if len(table.shape) == 1 else [table.iloc[:, number] for number in range(table.shape[1])]
        self._check_limit(len(columns), _MOST_OBJECTS)
        names = None if len(table.shape) == 1 else self._mark_of_elements([*table.columns])
        return table.shape, names, [self._mark_of_array(each.to_numpy(), compares_address=False) for each in columns]

    def _mark_of_tensor(self, tensor: torch.Tensor) -> object:
        version = 0 if tensor.is_inference() else tensor._version  # how often it was changed in place
        mark = tensor.dtype, () if tensor.is_nested else tuple(tensor.shape), version
        if tensor.device.type != "cpu" or not is_dense(tensor):
            return mark
        if tensor.is_shared():  # type: ignore[no-untyped-call]
            return *mark, tensor.data_ptr()  # workers see changes that are made in place
        self._count_bytes(tensor.nbytes)
        elements = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
        return *mark, tensor.data_ptr(), crc32(elements.view(torch.uint8).numpy().data)

    def _mark_of_array(self, values: npt.NDArray[np.generic], compares_address: bool = True) -> object:
        address = values.__array_interface__["data"][0] if compares_address else None
        mark = values.dtype.str, values.shape, address
        if values.dtype.hasobject:
            return *mark, self._mark_of_elements(values.reshape(-1).tolist())
        is_constant = not values.flags.writeable and compares_address  # pandas returns changed data in constant arrays
        if is_constant or isinstance(values, np.memmap) or isinstance(values.base, np.memmap):
            return mark  # the array is in a file, which workers read themselves
        self._count_bytes(values.nbytes)
        return *mark, crc32(np.ascontiguousarray(values).view(np.uint8).data)

    def _mark_of_elements(self, elements: list[object]) -> object:
        """Return the mark of the elements of a list, dict, set or array of objects."""
        self._elements += len(elements)
        self._check_limit(self._elements, _MOST_ELEMENTS)
        checksum = 0
        for begin in range(0, len(elements), _CHUNK):
            chunk = elements[begin : begin + _CHUNK]
            try:
                content = marshal.dumps(chunk, 2)  # in later versions, the bytes also depend on who else refers to them
            except ValueError:  # elements of other types than those of Python
                self._left += chunk
                continue
            self._count_bytes(len(content))
            checksum = crc32(content, checksum)
        return len(elements), checksum

    def _count_bytes(self, size: int) -> None:
        self._bytes += size
        self._check_limit(self._bytes, _MOST_BYTES)
