"""Sources, samples and batches; the loaders that read them, and the outputs of steps. Below the run."""

from pytorch_accel_lite.base.nested_data import parts_in, tensors_in
from pytorch_accel_lite.base.reachable_objects import is_a, nested_in, parts_held, reachable_from
from pytorch_accel_lite.data.batch_adapter import (
    IGNORED_LABEL,
    TARGET_KEYS,
    LossShapeError,
    first_label,
    shapes_are_known,
)
from pytorch_accel_lite.data.batch_size import infer_batch_size, is_as_long, is_packed
from pytorch_accel_lite.data.batch_slices import WHAT_CAN_BE_SPLIT, is_list_of_samples, select_samples, slice_batch
from pytorch_accel_lite.data.batches import Batch, is_single_sample
from pytorch_accel_lite.data.concatenation import ListOfSamples, concatenate, to_cpu
from pytorch_accel_lite.data.data_marks_seam import DATA_MARKS, Marks, marks_of
from pytorch_accel_lite.data.dataloader_creation import DEFAULT_BATCH_SIZE, LoaderKwargs, faster_data
from pytorch_accel_lite.data.device_placement import to_device
from pytorch_accel_lite.data.loader_base import LoaderOptions, ShardedLoader, copy_loader
from pytorch_accel_lite.data.loader_choice import SEQUENTIAL_READER, SequentialReader, is_loader_of_torch
from pytorch_accel_lite.data.map_loader import MapLoader
from pytorch_accel_lite.data.named_datasets import check_are_named, sizes_of
from pytorch_accel_lite.data.reading import add_missing_note, list_samples, names_sample, reader_of
from pytorch_accel_lite.data.sample_order import of_all_processes
from pytorch_accel_lite.data.sampler_order_checks import PASS_OWN_SHARD, checksum_of_indices
from pytorch_accel_lite.data.shares import share_bounds
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
)
from pytorch_accel_lite.data.step_outputs import check_items, complete_output, is_number, mean_that_counts
from pytorch_accel_lite.data.steps_from_position import (
    count_global_batches,
    early_end_error,
    grouped,
    skip_samples,
    with_last,
)

__all__ = [
    "Batch", "BatchData", "BatchOutput", "DATA_MARKS", "DEFAULT_BATCH_SIZE", "IGNORED_LABEL", "Index", "IndexedData",
    "ListOfSamples", "LoaderKwargs", "LoaderOptions", "LossShapeError", "MapLoader", "Marks", "OwnShard",
    "PASS_OWN_SHARD", "SEQUENTIAL_READER", "Sample", "SequentialReader", "ShardedLoader", "Source", "SourceState",
    "TARGET_KEYS", "TrainingOrder", "WHAT_CAN_BE_SPLIT", "add_missing_note", "check_are_named", "check_items",
    "checksum_of_indices", "complete_output", "concatenate", "copy_loader", "count_global_batches", "dataset_of",
    "early_end_error", "faster_data", "find_length", "first_label", "grouped", "infer_batch_size", "is_a",
    "is_as_long", "is_list_of_samples", "is_loader_of_torch", "is_number", "is_packed", "is_single_sample",
    "list_samples", "marks_of", "mean_that_counts", "names_sample", "nested_in", "of_all_processes", "parts_held",
    "parts_in", "reachable_from", "reader_of", "select_samples", "shapes_are_known", "share_bounds", "sizes_of",
    "skip_samples", "slice_batch", "tensors_in", "to_cpu", "to_device", "with_last",
]  # fmt: skip
