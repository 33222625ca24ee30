"""The number of samples of a batch, inferred from its tensors and from what its objects report."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pytorch_accel_lite.base.types import Tree
from pytorch_accel_lite.base.values.nested_data import parts_in, tensors_in
from pytorch_accel_lite.data.sources import BatchData


def infer_batch_size(batch: BatchData, expected: int | None = None) -> int:
    """Return the number of samples in a batch.

    Args:
        expected: number of samples that were collated, or ``None`` if unknown. It is returned if anything in the batch
            has this length, or if the batch is a row of packed sequences. Otherwise, the collate function has dropped
            some, and the length of the first tensor with dimensions is returned.

    Raises:
        ValueError: if the size cannot be determined
    """
    first = batch[0] if type(batch) in (tuple, list) and batch else None
    if isinstance(first, torch.Tensor) and first.ndim:
        length = first.shape[0]
        if expected is None or expected == length:
            return length  # the usual case, without slow checks of abstract types
    if expected is not None and (is_packed(batch) or any(is_as_long(part, expected) for part in parts_in(batch))):
        return expected
    result = _length_of_lists(batch)
    result = next((len(tensor) for tensor in tensors_in(batch)), None) if result is None else result
    result = _reported_size(batch, expected) if result is None else result
    if result is None:
        raise ValueError(
            f"The batch size cannot be determined from a batch of type {type(batch).__name__} without tensors. Return "
            "'batch_size' from calculate_train_batch_loss / calculate_eval_batch_loss. Several processes must know it "
            "before the step: give the batch a tensor with a row for each sample, or an attribute batch_size."
        )
    return result


def _length_of_lists(batch: BatchData) -> int | None:
    """Return the length of the lists in a batch if all have an element for each sample, as for detectors.

    If all are lists of dicts, each of these may be a view of the whole batch.
    """
    lists = batch if isinstance(batch, (list, tuple)) else ()
    lengths = [len(part) for part in lists if are_dicts_of_samples(part)]
    return lengths[0] if 0 < len(lengths) < len(lists) and all(is_as_long(part, lengths[0]) for part in lists) else None


def _reported_size(batch: BatchData, expected: int | None) -> int | None:
    """Return the size of a batch without tensors of its own, as reported by an object in it, or the expected size.

    A batch of graphs has ``num_graphs`` (torch_geometric). Batches of other libraries have a ``batch_size``. In other
    objects, all attributes that are tensors may have the same number of rows.
    """
    for part in [batch, *parts_in(batch)]:
        for name in ("num_graphs", "batch_size"):
            size = getattr(part, name, None)
            if isinstance(size, int) and size > 0:
                return size
    if expected is not None:
        return expected
    attributes = [value for part in [batch, *parts_in(batch)] for value in getattr(part, "__dict__", {}).values()]
    lengths = {len(tensor) for tensor in tensors_in(attributes)}
    return lengths.pop() if len(lengths) == 1 else None


def size_of_filler(batch: BatchData) -> int:
    """Return a size for a filler batch. A filler batch has no weight, so its true size need not be known."""
    try:
        return infer_batch_size(batch)
    except ValueError:
        return 1


def is_packed(batch: BatchData) -> bool:
    """Whether a batch is a single row of several sequences, each with positions from 0."""
    positions = batch.get("position_ids") if isinstance(batch, Mapping) else None
    return isinstance(positions, torch.Tensor) and positions.ndim == 2 and len(positions) == 1


def are_dicts_of_samples(data: Tree) -> bool:
    """Whether a list has a dict with the same keys for each sample, as the targets of detectors."""
    is_list = isinstance(data, (list, tuple)) and len(data) > 0
    return is_list and all(isinstance(element, Mapping) and element.keys() == data[0].keys() for element in data)


def is_as_long(data: Tree, size: int) -> bool:
    """Whether data have an element for each of ``size`` samples."""
    if isinstance(data, torch.Tensor):
        return data.ndim > 0 and len(data) == size
    if isinstance(data, Mapping):
        return bool(data) and all(is_as_long(value, size) for value in data.values())
    return isinstance(data, (list, tuple)) and len(data) == size
