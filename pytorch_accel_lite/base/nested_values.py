"""Values: nested data, such as batches, plain numbers, and what tensors hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from pytorch_accel_lite.base.types import Tree


def tensors_in(data: Tree) -> Iterator[torch.Tensor]:
    """Yield the tensors with dimensions in nested data."""
    return (part for part in parts_in([data]) if isinstance(part, torch.Tensor) and part.ndim)


def parts_in(data: Tree) -> Iterator[Tree]:
    """Yield all parts of nested data, at every level."""
    values: Iterable[Tree] = ()
    if isinstance(data, Mapping):
        values = data.values()
    elif isinstance(data, Sequence) and not isinstance(data, (str, bytes)):
        values = data
    elif is_dataclass(data):
        values = [getattr(data, field.name) for field in dataclasses.fields(data)]
    for value in values:
        yield value
        yield from parts_in(value)


def is_dataclass(data: object) -> bool:
    """Whether data are an instance of a dataclass."""
    return dataclasses.is_dataclass(data) and not isinstance(data, type)


def to_number(value: object) -> Any:
    """Return a scalar of numpy or torch as a Python number; anything else unchanged."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else value


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements of a tensor can be read as they are: not if it is sparse, nested, quantised, or has none."""
    return tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized or tensor.is_meta)


def distinct_elements(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of the elements with memory of their own. torch writes only to such elements; see ``expand``."""
    for dimension, stride in enumerate(tensor.stride() if tensor.layout is torch.strided else ()):
        if stride == 0 and tensor.shape[dimension] > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor
