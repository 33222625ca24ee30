"""The batches that loaders yield: their samples, slices and places."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from accelerate.utils import recursively_apply, send_to_device
from accelerate.utils.operations import honor_type

from pytorch_accel_lite.base.nested_values import is_dataclass, parts_in, tensors_in
from pytorch_accel_lite.base.types import Tree
from pytorch_accel_lite.data.sources import BatchData, BatchOutput, Index, find_length


class Share(NamedTuple):
    """One of a fixed number of shares in a step.

    Args:
        number: the number of the share
        seed: the seed of the step, a mixture of the run's seed, the epoch and the position
        ends_step: whether this is the last share of the step on this process
    """

    number: int
    seed: int
    ends_step: bool


class Batch(NamedTuple):
    """A batch of this process, with the number of samples of all processes in the same step.

    Args:
        data: the batch, on the device
        num_samples: number of samples of this process. 0 for a filler batch, see ``is_filler``. ``None`` if only the
            step knows it.
        total_samples: number of samples of all processes in this step; ``None`` if unknown, like ``num_samples``
        is_last: whether this is the last step of the epoch
        indices: indices of the samples in the dataset, as a list or a tensor; ``None`` if unknown
        share: the share with this batch, if the number of shares is fixed; ``None`` for the batch of a process. In a
            training step, it is the last share of the step, and ``data`` has the batches of all its shares.
    """

    data: BatchData
    num_samples: int | None
    total_samples: int | None
    is_last: bool
    indices: Sequence[Index] | torch.Tensor | None = None
    share: Share | None = None

    def samples(self, output: BatchOutput) -> tuple[int, int]:
        """Return the number of samples of this process and of all processes, taken from ``output`` if unknown."""
        local = int(output["batch_size"]) if self.num_samples is None else self.num_samples
        return local, local if self.total_samples is None else self.total_samples

    @property
    def is_filler(self) -> bool:
        """Whether the batch only keeps this process in step with the others, and must get no weight."""
        return self.num_samples == 0


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


def to_device(steps: Iterator[Batch], device: torch.device | None, channels_last: bool) -> Iterator[Batch]:
    """Return steps with their data on a device, without waiting for the copies.

    Args:
        device: the device; ``None`` if the data are already on it
        channels_last: whether to convert tensors with four dimensions to the channels-last memory format
    """
    if device is not None:
        steps = (step._replace(data=_send(step.data, device)) for step in steps)
    if channels_last:
        steps = (step._replace(data=recursively_apply(_to_channels_last, step.data)) for step in steps)
    return steps


def _send(data: BatchData, device: torch.device) -> BatchData:
    """Return data on a device. Accelerate leaves the tensors of dataclasses where they are."""
    if type(data) in (tuple, list):
        return type(data)(_send(part, device) for part in data)
    if type(data) is dict:
        return {name: _send(part, device) for name, part in data.items()}
    if is_dataclass(data) and not isinstance(data, Mapping) and not hasattr(data, "to"):
        sent = copy.copy(data)
        for field in dataclasses.fields(data):  # which may be frozen, or not set yet
            if hasattr(data, field.name):
                object.__setattr__(sent, field.name, _send(getattr(data, field.name), device))
        return sent
    return send_to_device(data, device, non_blocking=True)


def _to_channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor
