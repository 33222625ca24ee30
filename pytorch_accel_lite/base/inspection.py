"""Inspecting objects: lengths, parts, signatures, and sums of tensors' bits."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sized
from typing import TypeVar

import torch

T = TypeVar("T")


def is_private(name: str) -> bool:
    """Whether a name begins with an underscore and is not a special name of Python, such as ``__init__``."""
    return name.startswith("_") and not name.endswith("__")


def find_length(thing: object) -> int | None:
    """Return ``len(thing)``, or ``None`` if the object has no length."""
    try:
        return len(thing) if isinstance(thing, Sized) else None
    except TypeError:
        return None


def nested_in(root: object, is_kind: Callable[[object], bool]) -> list[object]:
    """Return an object and the objects of a kind inside it: in attributes, and in lists and dicts among them.

    Lists that begin with an object of another kind are not searched, because they may be long.
    """
    nested = [root]
    seen = {id(root)}
    for item in nested:  # grows in the loop
        for value in getattr(item, "__dict__", {}).values():
            values = list(value.values()) if isinstance(value, dict) else value
            parts = values if isinstance(values, (list, tuple)) else [value]
            for part in parts if parts and is_kind(parts[0]) else []:
                if is_kind(part) and id(part) not in seen:
                    seen.add(id(part))
                    nested.append(part)
    return nested


def distinct_elements(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of the elements with memory of their own. torch writes only to such elements; see ``expand``."""
    for dimension, stride in enumerate(tensor.stride() if tensor.layout is torch.strided else ()):
        if stride == 0 and tensor.shape[dimension] > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def sums_of_bits(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return the sum over each tensor's elements, interpreted as integers: flipping any bit changes it."""
    sums: list[torch.Tensor] = []
    for tensor in tensors:
        data = tensor.detach()
        if data.is_complex():
            data = torch.view_as_real(data)
        total = data.view(_INTEGERS[data.element_size()]).sum(dtype=torch.int64)
        sums.append(total.to(sums[0].device) if sums else total)
    return torch.stack(sums).tolist() if sums else []  # a single read from the device


def accepts(function: Callable[..., object], *arguments: object) -> bool:
    """Whether a function can be called with these positional arguments."""
    try:
        inspect.signature(function).bind(*arguments)
    except (TypeError, ValueError) as error:
        return isinstance(error, ValueError)  # the function is not written in Python
    return True
