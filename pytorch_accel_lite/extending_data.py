"""Names for extensions of ``data``, besides the names for users. They come from layers below the run."""

from pytorch_accel_lite.base.argument_checks import check_positive_int, check_range
from pytorch_accel_lite.base.change_marks import Marks, marks_of
from pytorch_accel_lite.base.generator_states import (
    find_held_generators,
    modules_with_generators,
    preserving_generators,
    state_of_generator,
)
from pytorch_accel_lite.base.inspection import find_length
from pytorch_accel_lite.base.module_modes import evaluation_mode
from pytorch_accel_lite.base.nested_data import parts_in, tensors_in
from pytorch_accel_lite.base.reachable import nested_in
from pytorch_accel_lite.base.seeding import (
    derive_seed,
    draw_seed,
    generator_with,
    seed_all,
    seed_generators,
    seed_held_generators,
)
from pytorch_accel_lite.base.types import StateDict, Tree
from pytorch_accel_lite.base.unknown_names import did_you_mean
from pytorch_accel_lite.base.user_warnings import warn_outside
from pytorch_accel_lite.data.batch_adapter import IGNORED_LABEL, first_label
from pytorch_accel_lite.data.batch_slices import slice_batch
from pytorch_accel_lite.data.batches import Batch, infer_batch_size, is_single_sample
from pytorch_accel_lite.data.consistency import PASS_OWN_SHARD
from pytorch_accel_lite.data.loader import LoaderKwargs, LoaderOptions, ShardedLoader, copy_loader
from pytorch_accel_lite.data.loader_choice import SEQUENTIAL_READER, SequentialReader, is_loader_of_torch
from pytorch_accel_lite.data.named_datasets import check_are_named, sizes_of
from pytorch_accel_lite.data.order import of_all_processes
from pytorch_accel_lite.data.shares import count_global_batches, grouped, with_last
from pytorch_accel_lite.data.skipping_on_resume import early_end_error, skip_samples
from pytorch_accel_lite.data.sources import BatchData, IndexedData, OwnShard, Sample, Source, SourceState, TrainingOrder
from pytorch_accel_lite.distributed import Ranks
from pytorch_accel_lite.distributed.messages import Message, decode

__all__ = [
    # Sources, samples and batches.
    "Batch", "BatchData", "IGNORED_LABEL", "IndexedData", "LoaderKwargs", "OwnShard", "Sample", "Source",
    "TrainingOrder", "Tree", "find_length", "first_label", "infer_batch_size", "is_loader_of_torch", "is_single_sample",
    "nested_in", "parts_in", "slice_batch", "tensors_in",
    # Several datasets by name.
    "check_are_named", "sizes_of",
    # Loaders of data that are read in turn.
    "LoaderOptions", "Marks", "SEQUENTIAL_READER", "SequentialReader", "ShardedLoader", "copy_loader",
    "count_global_batches", "grouped", "marks_of", "with_last",
    # Their positions.
    "SourceState", "StateDict", "early_end_error", "skip_samples",
    # The processes that read.
    "Message", "PASS_OWN_SHARD", "Ranks", "decode", "of_all_processes",
    # Random numbers, arguments and warnings.
    "check_positive_int", "check_range", "derive_seed", "did_you_mean", "draw_seed", "evaluation_mode",
    "find_held_generators", "generator_with", "modules_with_generators", "preserving_generators", "seed_all",
    "seed_generators", "seed_held_generators", "state_of_generator", "warn_outside",
]  # fmt: skip
