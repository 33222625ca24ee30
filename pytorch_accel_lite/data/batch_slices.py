"""Slices of batches, and chosen samples of them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, MutableMapping

import numpy as np
import torch
from accelerate.utils.operations import honor_type

from pytorch_accel_lite.base.types import Tree
from pytorch_accel_lite.base.values.nested_data import is_dataclass, parts_in
from pytorch_accel_lite.data.batch_size import are_dicts_of_samples, is_as_long
from pytorch_accel_lite.data.sources import BatchData, find_length


def is_list_of_samples(data: Tree, size: int) -> bool:
    """Whether a list has one element per sample, rather than a column over all samples in each element.

    If both are possible, because there are as many columns as samples, it is a list of samples only if all elements
    have the same type and, except for the length, the same shape. Dicts with the same keys are always samples, as for
    detectors, whose images may have as many boxes as the batch has images.
    """
    if not isinstance(data, (list, tuple)) or len(data) != size:
        return False
    if are_dicts_of_samples(data):
        return True
    as_long = [is_as_long(element, size) for element in data]
    kinds = {(type(element), element.shape[1:] if isinstance(element, torch.Tensor) else None) for element in data}
    return not any(as_long) or (not all(as_long) and len(kinds) == 1)


def select_samples(data: BatchData, rows: slice | list[int], size: int) -> BatchData:
    """Return some of the ``size`` samples of a batch, in any order and possibly repeated.

    They are selected in tensors and arrays with the samples as their first dimension, and in lists with an element for
    each sample, in dicts, lists, tuples and dataclasses. Anything else is returned as it is.

    Raises:
        ValueError: if an object that cannot be divided has an element for each sample
    """
    if isinstance(data, (torch.Tensor, np.ndarray)):
        return data[rows] if data.ndim and len(data) == size else data
    if isinstance(data, Mapping):
        return _select_in_mapping(data, rows, size)
    if isinstance(data, (list, tuple)):
        if is_list_of_samples(data, size):
            return data[rows] if isinstance(rows, slice) else type(data)(data[row] for row in rows)
        return honor_type(data, [select_samples(value, rows, size) for value in data])
    if is_dataclass(data):
        names = [field.name for field in dataclasses.fields(data) if field.init]  # the constructor sets others
        return dataclasses.replace(data, **{name: select_samples(getattr(data, name), rows, size) for name in names})
    check_belongs_to_all(data, size)
    return data


def _select_in_mapping(data: Mapping[str, Tree], rows: slice | list[int], size: int) -> Mapping[str, Tree]:
    """Return the selected samples in a mapping of the same class, such as a tokenizer's; in a dict if that fails."""
    values = {key: select_samples(value, rows, size) for key, value in data.items()}
    if type(data) is dict or not isinstance(data, MutableMapping):
        return values
    attributes = {name: select_samples(value, rows, size) for name, value in getattr(data, "__dict__", {}).items()}
    try:
        selected = copy.copy(data)
        getattr(selected, "__dict__", {}).update(attributes)
        for key, value in values.items():  # outputs of transformers refuse update()
            selected[key] = value
    except Exception:  # a class may want its values to have one length, or refuse changes
        return values
    return selected


#: What to do about a batch that cannot be divided.
WHAT_CAN_BE_SPLIT = "Let collate_fn return tensors, or lists, dicts or dataclasses of tensors."


def check_belongs_to_all(data: Tree, size: int) -> None:
    """Check that an object in a batch belongs to all of its samples.

    Raises:
        ValueError: if the object, or something in it, seems to have an element for each sample
    """
    if isinstance(data, (str, bytes)):
        return
    parts = parts_in([data, *getattr(data, "__dict__", {}).values()])
    if (hasattr(data, "__getitem__") and find_length(data) == size) or any(is_as_long(part, size) for part in parts):
        raise ValueError(
            f"A {type(data).__name__} in a batch of {size} samples has an element for each, but cannot be split. "
            f"{WHAT_CAN_BE_SPLIT}"
        )
