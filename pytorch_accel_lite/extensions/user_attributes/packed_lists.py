"""Packing long lists of similar items, such as transitions in a replay buffer, into a tensor per part of an item."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

#: The kind of the items, the names or the class that they share, and the columns.
Columns: TypeAlias = tuple[str, Any, list["_Column"]]
#: The kind of the values in a column, and the values.
_Column: TypeAlias = tuple[Any, ...]
Device: TypeAlias = torch.device | str
_NUMBERS: dict[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float64}
_TYPES: dict[str, type] = {kind.__name__: kind for kind in _NUMBERS}


def pack_columns(items: Iterable[Any]) -> Columns | None:
    """Return similar items as columns; ``None`` if they differ in form, or hold other than numbers, arrays, tensors."""
    items = [*items]
    first = items[0]
    kind = type(first)
    if {*map(type, items)} != {kind}:
        return None
    if not isinstance(first, (tuple, dict)):
        column = _pack(items)
        return None if column is None else ("items", None, [column])
    if isinstance(first, dict):
        names = tuple(first)
        if kind is not dict or len({*map(id, items)}) != len(items) or {type(name) for name in names} - {str}:
            return None
        if any(tuple(item) != names for item in items):
            return None
        rows: Iterable[Sequence[object]] = ([*item.values()] for item in items)
        columns = _pack_all(rows)
        return None if columns is None else ("dict", [*names], columns)
    if len({*map(len, items)}) != 1 or (kind is not tuple and not hasattr(kind, "_fields")):
        return None
    columns = _pack_all(items)
    name = None if kind is tuple else f"{kind.__module__}:{kind.__qualname__}"
    return None if columns is None else ("tuple", name, columns)


def unpack_columns(
    columns: Columns, place: Callable[[str], Device], find_class: Callable[[str], type]
) -> Iterable[object]:
    """Return the items of columns.

    Args:
        place: returns the device for tensors that were on a given type of device
        find_class: returns a class by its name
    """
    kind, shared, packed = columns
    values = [_unpack(column, place) for column in packed]
    if kind == "items":
        return values[0]
    if kind == "dict":
        return [dict(zip(shared, row, strict=True)) for row in zip(*values, strict=True)]
    rows = zip(*values, strict=True)
    if shared is None:
        return rows
    cls: type[tuple[object, ...]] = find_class(shared)
    return [tuple.__new__(cls, row) for row in rows]


def _pack_all(rows: Iterable[Sequence[object]]) -> list[_Column] | None:
    columns = []
    for values in zip(*rows, strict=True):
        column = _pack(values)
        if column is None:
            return None
        columns.append(column)
    return columns or None


def _pack(values: Sequence[Any]) -> _Column | None:
    """Return the values of a column as one tensor, with their kind; ``None`` if the kinds differ."""
    kind = type(values[0])
    if {*map(type, values)} != {kind}:
        return None
    if kind in _NUMBERS:
        try:
            return kind.__name__, torch.tensor(values, dtype=_NUMBERS[kind])
        except (OverflowError, RuntimeError):  # integers of more than 64 bits
            return None
    if kind is torch.Tensor:
        return _pack_tensors(values)
    if kind is np.ndarray or issubclass(kind, np.generic):
        return _pack_arrays(values)
    return None


def _pack_tensors(values: Sequence[torch.Tensor]) -> _Column | None:
    """Return distinct tensors of one shape as one tensor, and the place in it of each value."""
    distinct = list({id(value): value for value in values}.values())
    kinds = {(v.dtype, v.shape, v.device, v.layout, v.requires_grad, v.is_quantized) for v in distinct}
    if (
        len(kinds) != 1
        or distinct[0].layout is not torch.strided
        or distinct[0].requires_grad
        or distinct[0].is_quantized
    ):
        return None
    return "tensor", distinct[0].device.type, torch.stack(distinct), _places(values, distinct)


def _pack_arrays(values: Sequence[npt.NDArray[np.generic]]) -> _Column | None:
    distinct = list({id(value): value for value in values}.values())
    dtype = distinct[0].dtype
    if {(v.dtype, v.shape) for v in distinct} != {(dtype, distinct[0].shape)} or dtype.kind not in "biufc":
        return None
    stacked = np.stack(distinct)
    content = torch.from_numpy(stacked.reshape(-1).view(np.uint8))
    kind = "array" if isinstance(distinct[0], np.ndarray) else "number"
    return kind, dtype.str, list(stacked.shape), content, _places(values, distinct)


def _places(values: Sequence[object], distinct: Sequence[object]) -> torch.Tensor | None:
    if len(distinct) == len(values):
        return None
    places = {id(value): place for place, value in enumerate(distinct)}
    return torch.tensor([places[id(value)] for value in values])


def _unpack(column: _Column, place: Callable[[str], Device]) -> Sequence[object]:
    kind, *parts = column
    if kind in _TYPES:
        numbers: list[float] = parts[0].tolist()
        return numbers
    if kind == "tensor":
        device, stacked, places = parts
        values = [row.clone() for row in stacked.to(place(device)).unbind()]
    else:
        dtype, shape, content, places = parts
        rows = content.numpy().view(np.dtype(dtype)).reshape(shape)
        values = [row.copy() for row in rows] if kind == "array" else [*rows]
    return values if places is None else [values[index] for index in places.tolist()]
