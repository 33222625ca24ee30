"""The outputs of a model, collected from several batches: copied to the CPU, and concatenated."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence

import torch
from accelerate.utils import recursively_apply
from accelerate.utils.operations import honor_type

from pytorch_accel_lite.base.display import listed
from pytorch_accel_lite.base.machine import await_processes
from pytorch_accel_lite.base.nested_values import is_dataclass, tensors_in
from pytorch_accel_lite.base.types import Tree
from pytorch_accel_lite.data.batches import is_list_of_samples

_BYTES_OF_A_CHUNK = 2**25


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
        return ListOfSamples(recursively_apply(lambda tensor: copy(await_processes(tensor.detach())), list(outputs)))
    if isinstance(outputs, torch.Tensor):
        if not outputs.ndim:
            raise ValueError("predict: the model returned a tensor without a sample dimension.")
        return copy(await_processes(outputs.detach() if outputs.requires_grad else outputs))
    if is_dataclass(outputs) and not isinstance(outputs, Mapping):
        outputs = {field.name: getattr(outputs, field.name) for field in dataclasses.fields(outputs)}
    if isinstance(outputs, Mapping):
        return {k: to_cpu(v, size, copy) for k, v in outputs.items() if next(tensors_in(v), None) is not None}
    if isinstance(outputs, (list, tuple)):
        return honor_type(outputs, (to_cpu(part, size, copy) for part in outputs))
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
        if of_some := set().union(*parts) - set(first).intersection(*parts):
            raise ValueError(
                f"predict: only for some batches, the model returned {listed(sorted(map(repr, of_some)))} with a "
                "sample dimension. Return the same tensors in calculate_predict_batch_output for each batch, also for "
                "one of a single sample."
            )
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
