"""Selecting samples of batches, and concatenating the outputs of several batches."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from accelerate.utils import recursively_apply
from accelerate.utils.operations import honor_type

from pytorch_accel_lite.base.inspection import find_length
from pytorch_accel_lite.base.types import Tree
from pytorch_accel_lite.data.batches import is_as_long, is_dataclass, parts_in, tensors_in
from pytorch_accel_lite.data.sources import BatchData


def is_list_of_samples(data: Tree, size: int) -> bool:
    """Whether a list has one element per sample, rather than a column over all samples in each element.

    If both are possible, because there are as many columns as samples, it is a list of samples only if all elements
    have the same type and, except for the length, the same shape. Dicts with the same keys are always samples, as for
    detectors, whose images may have as many boxes as the batch has images.
    """
    if not isinstance(data, (list, tuple)) or len(data) != size:
        return False
    if size and all(isinstance(element, Mapping) and element.keys() == data[0].keys() for element in data):
        return True
    as_long = [is_as_long(element, size) for element in data]
    kinds = {(type(element), element.shape[1:] if isinstance(element, torch.Tensor) else None) for element in data}
    return not any(as_long) or (not all(as_long) and len(kinds) == 1)


def slice_batch(data: BatchData, begin: int, end: int, size: int) -> BatchData:
    """Return the samples from ``begin`` to ``end`` of a batch of ``size`` samples; see ``select_samples()``."""
    return select_samples(data, slice(begin, end), size)


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
        return {key: select_samples(value, rows, size) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        if is_list_of_samples(data, size):
            return data[rows] if isinstance(rows, slice) else type(data)(data[row] for row in rows)
        return honor_type(data, [select_samples(value, rows, size) for value in data])
    if is_dataclass(data):
        names = [field.name for field in dataclasses.fields(data) if field.init]  # the constructor sets others
        return dataclasses.replace(data, **{name: select_samples(getattr(data, name), rows, size) for name in names})
    check_belongs_to_all(data, size)
    return data


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


class ListOfSamples(list[Tree]):
    """Outputs with an arbitrary element for each sample, as returned by detection models."""


def to_cpu(
    outputs: Tree, size: int | None = None, copy: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.cpu
) -> Tree:
    """Return nested outputs as tensors on the CPU, in plain tuples, lists and dicts.

    Entries without a sample dimension, such as a mean loss, and entries that are not tensors are dropped from dicts;
    elsewhere they raise an error.

    Args:
        size: number of samples, so that a list with an element for each sample is recognised and kept
        copy: copies a tensor to the CPU
    """
    is_of_samples = size is not None and type(outputs) is list and is_list_of_samples(outputs, size)
    if is_of_samples or isinstance(outputs, ListOfSamples):
        return ListOfSamples(recursively_apply(lambda tensor: copy(tensor.detach()), list(outputs)))
    if isinstance(outputs, torch.Tensor):
        if not outputs.ndim:
            raise ValueError("predict: the model returned a tensor without a sample dimension.")
        return copy(outputs.detach() if outputs.requires_grad else outputs)
    if is_dataclass(outputs) and not isinstance(outputs, Mapping):
        outputs = {field.name: getattr(outputs, field.name) for field in dataclasses.fields(outputs)}
    if isinstance(outputs, Mapping):
        return {k: to_cpu(v, copy=copy) for k, v in outputs.items() if next(tensors_in(v), None) is not None}
    if isinstance(outputs, (list, tuple)):
        return honor_type(outputs, (to_cpu(part, copy=copy) for part in outputs))
    raise TypeError(
        f"predict: the model returned {type(outputs).__name__}, but must return tensors, or tuples, lists or dicts of "
        "tensors. Override calculate_predict_batch_output to convert its outputs."
    )


def concatenate(parts: Sequence[Tree]) -> Tree:
    """Concatenate nested outputs of the same structure along their first dimension."""
    first = parts[0]
    if any(isinstance(part, ListOfSamples) for part in parts):
        return ListOfSamples(itertools.chain(*parts))
    if isinstance(first, torch.Tensor):
        try:
            return torch.cat(list(parts))
        except RuntimeError as error:
            raise ValueError(
                f"predict: outputs of shapes {sorted({tuple(p.shape[1:]) for p in parts})} per sample cannot be "
                "concatenated. Pad them to one shape in calculate_predict_batch_output."
            ) from error
    if isinstance(first, Mapping):
        return {key: concatenate([part[key] for part in parts]) for key in first}
    if len({len(part) for part in parts}) > 1:
        raise ValueError(
            f"predict: the model returned lists of {sorted({len(part) for part in parts})} elements, which cannot be "
            "concatenated. Return tensors or dicts in calculate_predict_batch_output, or a list with one per sample."
        )
    return honor_type(first, map(concatenate, zip(*parts, strict=True)))


class Concatenation:
    """Concatenates nested outputs as they come, without ever taking their memory twice.

    Outputs are collected in large chunks, and each chunk is freed as soon as it has been copied. Small tensors would
    not do: an allocator reuses their memory for other small tensors, but does not return it.
    """

    def __init__(self) -> None:
        self._chunks: list[Tree] = []
        self._parts: list[Tree] = []
        self._bytes = 0

    def add(self, parts: Sequence[Tree]) -> None:
        """Append outputs of the same structure."""
        self._parts.extend(parts)
        self._bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(parts))
        if self._bytes >= _BYTES_OF_A_CHUNK:
            self._end_chunk()

    def result(self) -> Tree:
        """Return all outputs, concatenated along their first dimension, and forget them."""
        if self._parts:
            self._end_chunk()
        chunks, self._chunks = self._chunks, []
        flattened = [torch.utils._pytree.tree_flatten(chunk) for chunk in chunks]
        columns = [list(column) for column in zip(*(leaves for leaves, _ in flattened), strict=False)]
        structure = flattened[0][1]
        if any(found != structure for _, found in flattened) or not all(map(_are_alike, columns)):
            return concatenate(chunks)
        del chunks, flattened
        return torch.utils._pytree.tree_unflatten(list(map(_concatenate_and_free, columns)), structure)

    def _end_chunk(self) -> None:
        self._chunks.append(concatenate(self._parts))
        self._parts, self._bytes = [], 0


_BYTES_OF_A_CHUNK = 2**25


def _are_alike(column: Sequence[Tree]) -> bool:
    """Whether all values are tensors of one type that differ only in their lengths."""
    first = column[0]
    return all(
        type(part) is torch.Tensor and part.dtype == first.dtype and part.shape[1:] == first.shape[1:]
        for part in column
    )


def _concatenate_and_free(parts: list[torch.Tensor]) -> torch.Tensor:
    """Concatenate tensors and empty the list from its end, so that the tensor allocated last is freed first."""
    if len(parts) == 1:
        return parts.pop()
    end = sum(map(len, parts))
    whole = parts[0].new_empty(end, *parts[0].shape[1:])
    while parts:
        part = parts.pop()
        whole[end - len(part) : end] = part
        end -= len(part)
    return whole
