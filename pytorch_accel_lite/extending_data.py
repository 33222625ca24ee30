"""What extensions of ``data`` are written with, in one list: ``extension_tools`` has it by subject."""

from pytorch_accel_lite.extension_tools.arguments_and_errors import *
from pytorch_accel_lite.extension_tools.data_and_batches import *
from pytorch_accel_lite.extension_tools.modules_and_devices import *
from pytorch_accel_lite.extension_tools.plain_types import *
from pytorch_accel_lite.extension_tools.processes import *
from pytorch_accel_lite.extension_tools.random_numbers import *

__all__ = [
    "Batch", "BatchData", "IGNORED_LABEL", "IndexedData", "LoaderKwargs", "LoaderOptions", "Marks", "Message",
    "OwnShard", "PASS_OWN_SHARD", "Ranks", "SEQUENTIAL_READER", "Sample", "SequentialReader", "ShardedLoader",
    "Source", "SourceState", "StateDict", "TrainingOrder", "Tree", "check_are_named", "check_positive_int",
    "check_range", "copy_loader", "count_global_batches", "decode", "derive_seed", "did_you_mean", "draw_seed",
    "early_end_error", "evaluation_mode", "find_held_generators", "find_length", "first_label", "generator_with",
    "grouped", "infer_batch_size", "is_loader_of_torch", "is_single_sample", "marks_of", "modules_with_generators",
    "nested_in", "of_all_processes", "parts_in", "preserving_generators", "seed_all", "seed_generators",
    "seed_held_generators", "sizes_of", "skip_samples", "slice_batch", "state_of_generator", "tensors_in",
    "warn_outside", "with_last",
]  # fmt: skip
