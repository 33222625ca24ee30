"""Reading batches: from memory a whole batch at a time, and samples one by one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset

from pytorch_accel_lite.base.types import Tree
from pytorch_accel_lite.base.warnings_and_errors import add_note, notes_of
from pytorch_accel_lite.data.sources import BatchData, Index, Sample, Source
from pytorch_accel_lite.data.steps_and_shares import grouped

_STEPS = 256  # number of steps whose indices are copied to a device together
_READING = "In reading"  # the beginning of the note of an error
_CPU = torch.device("cpu")
#: Row numbers in tensors.
Rows: TypeAlias = Sequence[int] | npt.NDArray[np.int64] | torch.Tensor
_Copies = dict[torch.device, torch.Tensor]


def inner_datasets(dataset: Source) -> list[Source]:
    """Return the datasets inside one of torch's dataset wrappers; an empty list for any other dataset."""
    reads_many = getattr(type(dataset), "__getitems__", None)
    if reads_many is Subset.__getitems__:
        return [dataset.dataset]
    is_concatenation = isinstance(dataset, ConcatDataset) and type(dataset).__getitem__ is ConcatDataset.__getitem__
    if reads_many is StackDataset.__getitems__ or is_concatenation:
        return list(dataset.datasets.values() if isinstance(dataset.datasets, dict) else dataset.datasets)
    return []


def reads_batches(dataset: Source) -> bool:
    """Whether a dataset reads many samples at once; torch's wrappers always have ``__getitems__``, so look inside."""
    inner = inner_datasets(dataset)
    has_method = callable(getattr(dataset, "__getitems__", None))
    return has_method and (not inner or any(map(reads_batches, inner)))


class InMemory(NamedTuple):
    """Data in memory.

    Args:
        tensors: tensors, which have a row for each sample
        subset: the rows of a ``Subset``; ``None`` for all rows
        arrange: makes a batch from a list of rows of each tensor
    """

    tensors: Sequence[torch.Tensor]
    subset: torch.Tensor | None = None
    arrange: Callable[[list[torch.Tensor]], BatchData] | None = None

    def is_on(self, device: torch.device) -> bool:
        """Whether all tensors are on a device, given with or without its number."""
        exact = torch.empty(0, device=device).device
        return all(tensor.device == exact for tensor in self.tensors)


def tensors_in_memory(dataset: Source) -> InMemory | None:
    """Return the tensors of a ``TensorDataset``, or of a ``StackDataset`` or ``Subset`` of them; or ``None``."""
    if type(dataset) is TensorDataset:
        return InMemory(dataset.tensors)
    if type(dataset) is StackDataset:
        tensors, structure = tree_flatten(_stacked(dataset))
        is_all = all(tensor is not None for tensor in tensors)
        return InMemory(tensors, arrange=partial(tree_unflatten, treespec=structure)) if is_all else None
    if type(dataset) is Subset:
        inner = tensors_in_memory(dataset.dataset)
        if inner is not None:
            indices = as_rows(dataset.indices, len(dataset.dataset))  # type: ignore[arg-type]
            return inner._replace(subset=indices if inner.subset is None else inner.subset[indices])
    return None


def _stacked(dataset: Source) -> Tree:
    """Return the tensors of a dataset, arranged as in a batch, with ``None`` in place of other data."""
    if type(dataset) is TensorDataset:
        return list(dataset.tensors)
    if type(dataset) is not StackDataset:
        return dataset if type(dataset) is torch.Tensor else None
    if isinstance(dataset.datasets, dict):
        return {name: _stacked(part) for name, part in dataset.datasets.items()}
    return [_stacked(part) for part in dataset.datasets]


def as_rows(indices: Rows, size: int) -> torch.Tensor:
    """Return indices for ``index_select``. Negative indices, which count from the end, become positive."""
    if isinstance(indices, np.ndarray):  # torch takes no reversed array, nor one of objects, as of pandas
        indices = indices.tolist() if indices.dtype == object else np.ascontiguousarray(indices)
    tensor = torch.as_tensor(indices)
    if tensor.numel() and (tensor.dtype is torch.bool or tensor.is_floating_point()):
        raise TypeError(
            f"Indices of samples, of a Subset or a sampler, must be integers, not {tensor.dtype} as in "
            f"{tensor.flatten()[:4].tolist()}. Convert a mask by torch.as_tensor(mask).nonzero().flatten()."
        )
    tensor = tensor.to(torch.int64)
    return torch.where(tensor < 0, tensor + size, tensor)


def read_rows(
    memory: InMemory, indices: Iterable[Sequence[int] | torch.Tensor], size: int, has_fixed_order: bool, pin: bool
) -> Iterator[BatchData]:
    """Yield the batches of data in memory; from a device, without waiting for it.

    Args:
        indices: the indices of each step; tensors have no negative indices
        size: number of samples
        has_fixed_order: whether indices may be drawn before the step that reads them
        pin: whether to put batches into pinned memory
    """
    tensors, subset, arrange = memory
    rows = (step if isinstance(step, torch.Tensor) else as_rows(step, size) for step in indices)
    if subset is not None:
        rows = (_select(subset, step) for step in rows)
    if memory.is_on(_CPU):
        steps: Iterator[_Copies] = ({_CPU: step} for step in rows)
    else:
        devices = {tensor.device for tensor in tensors}
        steps = _copied(rows, devices, _STEPS if has_fixed_order else 1)
    for copies in steps:
        batch = [_select(tensor, copies[tensor.device]) for tensor in tensors]
        batch = [tensor.pin_memory() for tensor in batch] if pin else batch
        yield batch if arrange is None else arrange(batch)


def _select(tensor: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return rows of a tensor, or raise an error that says which one it does not have."""
    try:
        return tensor.index_select(0, indices)
    except IndexError:
        missing = [index for index in indices.tolist() if not 0 <= index < len(tensor)]
        if not missing:
            raise
        which = missing[0] if missing[0] >= 0 else missing[0] - len(tensor)  # as it was before as_rows()
        raise IndexError(
            f"There is no sample {which} among the {len(tensor)} samples in memory. Check the indices that a sampler "
            "or a Subset gives."
        ) from None


def _copied(rows: Iterator[torch.Tensor], devices: set[torch.device], num_steps: int) -> Iterator[_Copies]:
    """Yield the rows of each step by device. The rows of several steps are copied together."""
    for steps in grouped(rows, num_steps):
        together = torch.cat(steps)
        if any(device.type == "cuda" for device in devices):
            together = together.pin_memory()  # otherwise the copy would wait for earlier steps
        sizes = [len(step) for step in steps]
        copies = {device: together.to(device, non_blocking=True).split(sizes) for device in devices}  # type: ignore[no-untyped-call]
        for number in range(len(steps)):
            yield {device: of_steps[number] for device, of_steps in copies.items()}


class SampleReader(Dataset[Sample]):
    """Reads the samples of a batch one by one, and notes in an error which sample could not be read."""

    def __init__(self, dataset: Source) -> None:
        self.dataset = dataset

    def __getitems__(self, indices: Iterable[Index]) -> list[Sample]:
        """Return the samples with these indices."""
        samples = []
        try:
            for index in indices:
                samples.append(self.dataset[index])
        except Exception as error:
            add_sample_note(error, self.dataset, index)
            raise
        return samples


def reader_of(dataset: Source) -> Source:
    """Return a reader of batches: the dataset itself if it reads many samples at once, or a ``SampleReader``."""
    is_subset = inner_datasets(dataset) and isinstance(dataset, Subset)
    reads_many = reads_batches(dataset) if is_subset else getattr(dataset, "__getitems__", None) is not None
    return dataset if reads_many else SampleReader(dataset)


def add_sample_note(error: Exception, dataset: Source, index: Index) -> None:
    """Note in an error that it was raised by reading a sample."""
    sample = f"{type(dataset).__name__}[{index!r}]"
    with suppress(Exception):  # it may be the index that is wrong
        while type(dataset) is Subset:
            dataset, index = dataset.dataset, dataset.indices[index]
            sample += f", which is {type(dataset).__name__}[{index!r}]"
    add_note(error, f"{_READING} {sample}.")


def add_missing_note(error: Exception, dataset: Source, indices: Iterable[Index] | None) -> None:
    """If an error may come from a sample that is ``None``, note which sample it is, by reading the samples again."""
    if not isinstance(error, (TypeError, AttributeError)) or "NoneType" not in str(error):
        return
    with suppress(Exception):
        missing = [index for index in indices or () if dataset[index] is None]
        if missing:
            kind = type(dataset).__name__
            add_note(
                error,
                f"{_READING} {kind}[{missing[0]!r}]: this sample is None. Return a sample for every index, or leave "
                "such samples out in collate_fn.",
            )


def names_sample(error: Exception) -> bool:
    """Whether an error, perhaps of a worker, says which sample could not be read."""
    return any(re.search(rf"(?m)^{_READING} ", text) for text in [str(error), *notes_of(error)])
