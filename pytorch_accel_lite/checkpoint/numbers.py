"""Long lists of numbers as tensors: one by one, those of a long history would take most of the time of a state."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

import torch

_SHORT = 16
_MARK = "numbers"
_CODES: dict[frozenset[type], tuple[str, torch.dtype]] = {
    frozenset({float}): ("d", torch.float64),
    frozenset({int}): ("q", torch.int64),
}


def pack_numbers(value: Any) -> Any:
    """Return a value in which long lists of floats, or of integers, in it or nested in dicts are tensors."""
    if isinstance(value, Mapping):
        return {name: pack_numbers(item) for name, item in value.items()}
    if type(value) is not list or len(value) < _SHORT:
        return value
    code, dtype = _CODES.get(frozenset(map(type, value)), ("", None))
    try:
        return (_MARK, torch.frombuffer(array(code, value), dtype=dtype)) if dtype is not None else value
    except OverflowError:  # an integer of more than 64 bits
        return value


def unpack_numbers(value: Any) -> Any:
    """Return what was given to :func:`pack_numbers`."""
    if isinstance(value, Mapping):
        return {name: unpack_numbers(item) for name, item in value.items()}
    return value[1].tolist() if isinstance(value, tuple) and value[:1] == (_MARK,) else value
