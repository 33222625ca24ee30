"""Names for extensions of ``data``, besides the names for users. They come from layers below the run."""

from pytorch_accel_lite.base.argument_checks import check_positive_int, check_range
from pytorch_accel_lite.base.generator_states import preserving_generators
from pytorch_accel_lite.base.module_modes import evaluation_mode
from pytorch_accel_lite.base.nested_data import tensors_in
from pytorch_accel_lite.base.seeding import derive_seed, draw_seed, generator_with, seed_generators
from pytorch_accel_lite.base.types import StateDict, Tree
from pytorch_accel_lite.base.unknown_names import did_you_mean
from pytorch_accel_lite.data.batch_adapter import IGNORED_LABEL, first_label
from pytorch_accel_lite.data.loader import LoaderKwargs
from pytorch_accel_lite.data.named_datasets import check_are_named, sizes_of
from pytorch_accel_lite.data.skipping_on_resume import early_end_error
from pytorch_accel_lite.data.sources import IndexedData, Sample, Source, SourceState, TrainingOrder
from pytorch_accel_lite.data.stream_positions import can_return, open_stream
from pytorch_accel_lite.data.stream_shards import part_of

__all__ = [
    # Sources, samples and batches.
    "IGNORED_LABEL", "IndexedData", "LoaderKwargs", "Sample", "Source", "TrainingOrder", "Tree", "first_label",
    "tensors_in",
    # Several datasets by name.
    "check_are_named", "sizes_of",
    # Streams, and their positions.
    "SourceState", "StateDict", "can_return", "early_end_error", "open_stream", "part_of",
    # Random numbers, and arguments.
    "check_positive_int", "check_range", "derive_seed", "did_you_mean", "draw_seed", "evaluation_mode",
    "generator_with", "preserving_generators", "seed_generators",
]  # fmt: skip
