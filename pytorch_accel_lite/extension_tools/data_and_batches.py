"""Sources, samples and batches; the loaders that read them, and the outputs of steps. Below the run."""

from __future__ import annotations

import copy
import numbers

import torch
from torch.utils.data import DataLoader

from pytorch_accel_lite.base.display import short_repr
from pytorch_accel_lite.base.machine import cores_per_process
from pytorch_accel_lite.base.nested_values import is_dense, parts_in, tensors_in
from pytorch_accel_lite.base.reachable_objects import is_a, nested_in, parts_held, reachable_from
from pytorch_accel_lite.data.batch_adapter import (
    IGNORED_LABEL,
    TARGET_KEYS,
    LossShapeError,
    first_label,
    shapes_are_known,
)
from pytorch_accel_lite.data.batches import (
    WHAT_CAN_BE_SPLIT,
    Batch,
    infer_batch_size,
    is_as_long,
    is_list_of_samples,
    is_packed,
    select_samples,
    to_device,
)
from pytorch_accel_lite.data.collected_outputs import ListOfSamples, concatenate, to_cpu
from pytorch_accel_lite.data.loader_base import LoaderOptions, ShardedLoader
from pytorch_accel_lite.data.loader_creation import (
    DEFAULT_BATCH_SIZE,
    SEQUENTIAL_READER,
    LoaderKwargs,
    SequentialReader,
    is_loader_of_torch,
)
from pytorch_accel_lite.data.map_loader import DATA_MARKS, MapLoader, Marks, marks_of
from pytorch_accel_lite.data.named_datasets import as_one_dataset, check_are_named, sizes_of
from pytorch_accel_lite.data.order_checks import PASS_OWN_SHARD, checksum_of_indices
from pytorch_accel_lite.data.outputs import check_items, complete_output, mean_that_counts
from pytorch_accel_lite.data.reading import add_missing_note, names_sample, reader_of
from pytorch_accel_lite.data.sample_order import of_all_processes
from pytorch_accel_lite.data.sources import (
    BatchData,
    BatchOutput,
    Index,
    IndexedData,
    OwnShard,
    Sample,
    Source,
    SourceState,
    TrainingOrder,
    dataset_of,
    find_length,
    is_named,
)
from pytorch_accel_lite.data.steps_and_shares import (
    count_global_batches,
    early_end_error,
    grouped,
    share_bounds,
    skip_samples,
    with_last,
)

__all__ = [
    "Batch", "BatchData", "BatchOutput", "DATA_MARKS", "DEFAULT_BATCH_SIZE", "IGNORED_LABEL", "Index", "IndexedData",
    "ListOfSamples", "LoaderKwargs", "LoaderOptions", "LossShapeError", "MapLoader", "Marks", "OwnShard",
    "PASS_OWN_SHARD", "SEQUENTIAL_READER", "Sample", "SequentialReader", "ShardedLoader", "Source", "SourceState",
    "TARGET_KEYS", "TrainingOrder", "WHAT_CAN_BE_SPLIT", "add_missing_note", "as_one_dataset", "check_are_named",
    "check_items", "checksum_of_indices", "complete_output", "concatenate", "copy_loader", "count_global_batches",
    "dataset_of", "early_end_error", "faster_data", "find_length", "first_label", "grouped", "infer_batch_size", "is_a",
    "is_as_long", "is_dense", "is_list_of_samples", "is_loader_of_torch", "is_named", "is_number", "is_packed",
    "is_single_sample", "list_samples", "marks_of", "mean_that_counts", "names_sample", "nested_in",
    "of_all_processes", "parts_held", "parts_in", "reachable_from", "reader_of", "select_samples", "shapes_are_known",
    "share_bounds", "sizes_of", "skip_samples", "slice_batch", "tensors_in", "to_cpu", "to_device", "with_last",
]  # fmt: skip

_MOST_OF_RANGE = 8  # consecutive samples that are listed one by one
_MOST_SAMPLES = 64  # samples whose indices are shown


def is_single_sample(item: BatchData) -> bool:
    """Whether an item is a pair of inputs and a target with different numbers of rows, like a single sample."""
    if type(item) not in (tuple, list) or len(item) != 2 or not isinstance(item[0], torch.Tensor) or not item[0].ndim:
        return False
    target = item[1]
    if isinstance(target, torch.Tensor):
        return not target.ndim or len(target) != len(item[0])
    return isinstance(target, numbers.Number)


def is_number(value: object) -> bool:
    """Whether a value is a number, or a tensor without dimensions."""
    if isinstance(value, torch.Tensor):
        return value.ndim == 0 and not value.is_complex()
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def copy_loader(loader: DataLoader[Sample], **changes: object) -> DataLoader[Sample]:
    """Return a copy of a loader with changed attributes. torch refuses to set these on an existing loader."""
    other = copy.copy(loader)
    vars(other).update(changes)
    return other


def faster_data(loader: Source, processes: int) -> str:
    """Return advice, for the cores of this machine, on how to feed a model that waits for the data of a loader."""
    workers = getattr(loader, "num_workers", 0)
    cores = cores_per_process(processes)
    if workers < cores:
        more = "more workers" if workers else "workers"
        count = min(cores, max(8, 2 * workers))
        advice = f"Use {more}, num_workers={count} in train_dataloader_kwargs or in your DataLoader, or precompute"
    else:
        advice = f"{workers} workers already share {cores} core{'s' * (cores > 1)}; more would not help. Precompute"
    return (
        f"{advice} what the dataset does for each sample. Data that fits in memory can be a TensorDataset, which is "
        "read a batch at a time."
    )


def list_samples(indices: list[Index]) -> str:
    """Return the indices of samples as text: of many consecutive indices the ends, of many others the first ones."""
    if len(indices) > _MOST_OF_RANGE and isinstance(first := indices[0], int):
        last = first + len(indices) - 1
        if indices == [*range(first, last + 1)]:
            return f"samples [{first} to {last}]"
    most = [short_repr(index) for index in indices[:_MOST_SAMPLES]]
    return f"samples [{', '.join(most)}{', ...' if len(indices) > len(most) else ''}]"


def slice_batch(data: BatchData, begin: int, end: int, size: int) -> BatchData:
    """Return the samples from ``begin`` to ``end`` of a batch of ``size`` samples; see ``select_samples()``."""
    return select_samples(data, slice(begin, end), size)
