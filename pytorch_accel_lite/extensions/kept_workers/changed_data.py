"""Noticing that objects, or their contents at any depth, have changed."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from types import ModuleType
from typing import Any, TypeAlias
from zlib import crc32

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader

from pytorch_accel_lite.extension_tools.data_and_batches import Marks, is_a, is_dense, parts_held

#: A list, tuple, set, dict or array of objects.
_Elements: TypeAlias = Any

_PLAIN = (str, bytes, int, float, complex, bool, type(None))
#: Types that are compared, but not searched.
_LEAVES = (ModuleType, type, torch.Tensor, np.ndarray, np.generic, DataLoader)
_SHORT = 1000  # elements, as many as parts_held searches in a list or dict
_MOST_OBJECTS = 10_000
_MOST_PLAIN = 1 << 17  # elements of a list of numbers or names that are all compared
_MOST_OTHERS = 1 << 13  # elements of other lists and of dicts
_PART = 16  # of a longer list, a 16th of the limit is compared
_MOST_BYTES = 1 << 24  # bytes of an array that are all compared
_PIECES, _PIECE = 1 << 10, 1 << 12  # pieces of a larger array that are compared, and bytes of a piece


def marks_of(roots: Iterable[object]) -> Marks:
    """Return marks that differ if objects, or their contents, have changed; reads nothing from a device.

    Marks cover the attributes of objects at any depth, and the objects that functions use: numbers, names, the shapes,
    versions and addresses of tensors, the contents of arrays, and elements of lists and dicts. Very long lists and
    large arrays are compared only in part.
    """
    marks: Marks = []
    seen: dict[int, object] = {}
    left = [*roots]
    while left and len(seen) < _MOST_OBJECTS:
        item = left.pop()
        if is_a(item, *_PLAIN):
            marks.append(_hash_of(item))
        elif id(item) not in seen:
            seen[id(item)] = item
            marks.append(type(item))
            marks += _own_marks(item)
            left += [] if is_a(item, *_LEAVES) else parts_held(item)
    return marks


def _own_marks(item: object) -> Iterator[object]:
    """Yield marks of an object itself, without those of its ``parts_held``."""
    if is_a(item, torch.Tensor):
        yield _mark_of_tensor(item)
    elif is_a(item, np.ndarray, np.generic):
        yield _mark_of_array(np.asarray(item))
        if is_a(item, np.ma.MaskedArray):
            yield _mark_of_array(np.ma.getmaskarray(item), compares_address=False)
    elif is_a(item, ModuleType, type):
        yield id(item)
    elif is_a(item, dict) and len(item) <= _SHORT:
        yield from map(_hash_of, item)
    elif is_a(item, list, tuple, dict, set, frozenset):
        yield id(item) if len(item) > _SHORT else None
        yield _mark_of_elements(item)
    elif is_a(item, deque):
        yield _mark_of_elements([*item])
    elif is_a(item, bytearray, array) and item:
        yield _mark_of_array(np.frombuffer(item, np.uint8))  # type: ignore[call-overload]
    elif hasattr(type(item), "iloc"):
        yield from _marks_of_table(item)


def _marks_of_table(table: Any) -> Iterator[object]:
    """Yield marks of the columns of a data frame, or of a series."""
    columns = [table] if len(table.shape) == 1 else [table.iloc[:, number] for number in range(table.shape[1])]
    yield table.shape
    yield None if len(table.shape) == 1 else _mark_of_elements([*table.columns])
    for column in columns[:_SHORT]:
        yield _mark_of_array(column.to_numpy(), compares_address=False)


def _mark_of_tensor(tensor: torch.Tensor) -> object:
    shape = () if tensor.is_nested else tuple(tensor.shape)
    if tensor.device.type != "cpu" or not is_dense(tensor):
        return tensor.dtype, shape, _version_of(tensor)
    if tensor.is_shared():  # type: ignore[no-untyped-call]
        return tensor.dtype, shape, tensor.data_ptr()  # workers see changes that are made in place
    few = tensor.detach().reshape(-1)[:: max(tensor.numel() // _PIECES, 1)]  # NumPy arrays may change it
    return (
        tensor.dtype,
        shape,
        _version_of(tensor),
        tensor.data_ptr(),
        crc32(few.resolve_conj().resolve_neg().contiguous().view(torch.uint8).numpy().tobytes()),
    )


def _version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor has been changed in place, which tensors made in inference mode do not count."""
    return 0 if tensor.is_inference() else tensor._version


def _mark_of_array(values: npt.NDArray[np.generic], compares_address: bool = True) -> object:
    address = values.__array_interface__["data"][0] if compares_address else None
    if values.dtype.hasobject:
        elements = values.reshape(-1)
        return values.shape, address, _mark_of_elements(elements if values.dtype == object else elements.tolist())
    is_constant = not values.flags.writeable and compares_address  # pandas returns changed data in constant arrays
    if is_constant or isinstance(values, np.memmap) or isinstance(values.base, np.memmap):
        return values.dtype.str, values.shape, address  # the array is in a file, which workers read themselves
    if values.nbytes <= _MOST_BYTES:
        return values.dtype.str, values.shape, address, crc32(np.ascontiguousarray(values).view(np.uint8).data)
    rows = values.reshape(-1) if values.flags.c_contiguous else values
    step, count = max(len(rows) // _PIECES, 1), max(_PIECE * len(rows) // values.nbytes, 1)
    number = 0
    for begin in range(0, len(rows), step):
        number = crc32(np.ascontiguousarray(rows[begin : begin + count]).tobytes(), number)
    return values.dtype.str, values.shape, address, number


def _mark_of_elements(elements: _Elements) -> int:
    """Return a hash of the elements of a list, dict, set or array of objects; of very many, only some count."""
    length = len(elements)
    if isinstance(elements, (set, frozenset)):
        return hash((length, frozenset(map(_hash_of, elements)) if length <= _MOST_PLAIN else None))
    if isinstance(elements, dict):
        elements = [*elements.items()]
    plain = tuple(_some_of(elements, _MOST_PLAIN))
    if {*map(type, plain)} <= {*_PLAIN}:
        return hash((length, *(map(_hash_of, plain) if -1 in plain else plain)))
    few = _some_of(elements, _MOST_OTHERS)
    return hash((length, *(_mark_of_element(element, depth=3) for element in few)))


def _hash_of(value: object) -> int:
    """Hash a number, a text or a key. To Python, -1 and -2 have the same hash."""
    return hash((value, "not -2")) if type(value) in (int, float) and value == -1 else hash(value)


def _some_of(elements: Sequence[object] | npt.NDArray[Any], most: int) -> Sequence[object] | npt.NDArray[Any]:
    return elements if len(elements) <= most else elements[:: -(-len(elements) * _PART // most)]


def _mark_of_element(element: object, depth: int) -> int:
    if is_a(element, *_PLAIN):
        return _hash_of(element)
    if is_a(element, torch.Tensor):
        return hash((id(element), _version_of(element)))
    if is_a(element, np.ndarray):
        few = element.reshape(-1)[:: max(element.size // _PIECES, 1)]
        return hash((id(element), few.tobytes() if element.dtype != object and element.flags.writeable else None))
    if depth and is_a(element, list, tuple, dict):
        parts = chain(element, element.values()) if is_a(element, dict) else iter(element)
        return hash((len(element), *(_mark_of_element(part, depth - 1) for part in islice(parts, _SHORT))))
    held = getattr(element, "__dict__", None)
    return hash((id(element), _mark_of_element(held, depth - 1) if depth and held else 0))
