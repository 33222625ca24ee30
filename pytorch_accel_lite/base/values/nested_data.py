"""Nested data, such as batches: the parts and the tensors in lists, dicts and dataclasses at any depth."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

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
