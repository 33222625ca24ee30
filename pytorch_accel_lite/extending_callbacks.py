"""Names for the built-in callbacks, besides the names for users and those of ``.extending``.

Each is written as a user could write it: it reads ``trainer.run``, and uses only names that are public somewhere.
"""

from pytorch_accel_lite.base.argument_checks import check_bool, check_choice, check_positive_number, optional
from pytorch_accel_lite.base.devices import AsyncCopy, accumulation_dtype, is_asynchronous, record_event, to_float
from pytorch_accel_lite.base.displays import in_notebook, is_terminal, shows_live
from pytorch_accel_lite.base.error_texts import add_note
from pytorch_accel_lite.base.escaping import escape_unprintable
from pytorch_accel_lite.base.formatting import align, format_duration, wrapped
from pytorch_accel_lite.base.generator_states import preserving_generators
from pytorch_accel_lite.base.inspection import find_length
from pytorch_accel_lite.base.mixed_precision import mixed_precision
from pytorch_accel_lite.base.module_modes import keep_in_eval, preserving_modes, release_from_eval
from pytorch_accel_lite.base.named_metrics import Classification, NamedMetric
from pytorch_accel_lite.base.paths import StrPath, parse_location
from pytorch_accel_lite.base.plain_values import as_number_or_text, as_plain, to_number
from pytorch_accel_lite.base.quantised import is_frozen_and_quantised, is_quantised_by, plain_parts, quantised_entries
from pytorch_accel_lite.base.reprs import html_table, short_repr
from pytorch_accel_lite.base.seeding import derive_seed, seed_all
from pytorch_accel_lite.base.sharded_weights import are_sharded, reshard
from pytorch_accel_lite.base.tqdm_bars import Bar, NotebookBar, NotebookOutput, TerminalBar
from pytorch_accel_lite.base.types import JsonObject, StateDict, Tree
from pytorch_accel_lite.base.unknown_names import did_you_mean, suggest_arguments
from pytorch_accel_lite.base.unwrapping import class_of, unwrap
from pytorch_accel_lite.callbacks.default_callbacks import DEFAULTS
from pytorch_accel_lite.callbacks.log_metrics import LogMetricsCallback
from pytorch_accel_lite.callbacks.metric_watcher import MetricWatcher
from pytorch_accel_lite.callbacks.metrics import default_transform
from pytorch_accel_lite.callbacks.print_progress import epoch_of
from pytorch_accel_lite.callbacks.progress_bar import ProgressBarCallback
from pytorch_accel_lite.checkpoint.disk.atomic_files import write_bytes
from pytorch_accel_lite.checkpoint.disk.background_writer import BackgroundWriter
from pytorch_accel_lite.checkpoint.disk.checkpoint_files import FROZEN
from pytorch_accel_lite.checkpoint.disk.plain_files import load_plain
from pytorch_accel_lite.checkpoint.models.supported_engines import (
    check_states_are_possible,
    refuse_engines,
    refuse_fsdp1,
)
from pytorch_accel_lite.checkpoint.models.weights import (
    check_has_trainable,
    full_state_dict,
    leave_out_frozen,
    model_checksums,
    sharded_like,
    weight_checksums,
    without_compile,
)
from pytorch_accel_lite.checkpoint.states.rotation import remove_old_states
from pytorch_accel_lite.checkpoint.states.store import state_name
from pytorch_accel_lite.checkpoint.store_choice import open_store
from pytorch_accel_lite.data.batch_slices import is_list_of_samples, slice_batch
from pytorch_accel_lite.data.concatenation import to_cpu
from pytorch_accel_lite.data.loader_choice import dataset_of
from pytorch_accel_lite.data.sources import BatchData, BatchOutput, Index
from pytorch_accel_lite.data.step_outputs import is_number
from pytorch_accel_lite.distributed import Ranks
from pytorch_accel_lite.distributed.gradient_sync import sync_ddp_buffers
from pytorch_accel_lite.extension_names import missing_extension_text
from pytorch_accel_lite.loop.clipping import total_norm
from pytorch_accel_lite.loop.inference import inference
from pytorch_accel_lite.optimizers.optimizer_parts import group_names, is_created, parts_of_optimizer, schedulers_in
from pytorch_accel_lite.optimizers.optimizer_types import TrainerOptimizer
from pytorch_accel_lite.optimizers.rates import ParamGroup
from pytorch_accel_lite.run.accumulation import Count
from pytorch_accel_lite.run.callback_handler import set_listening
from pytorch_accel_lite.run.current_rates import current_rates, rates_change_in_each_update
from pytorch_accel_lite.run.events import Failure, Phase, Picture
from pytorch_accel_lite.run.goodput import describe_fractions
from pytorch_accel_lite.run.history import MetricValue, NewMetrics
from pytorch_accel_lite.run.intervals import CountedRun, Interval, parse_interval
from pytorch_accel_lite.run.metric_checks import ExpectedMetrics
from pytorch_accel_lite.run.trained_parts import evaluating_optimizers

__all__ = [
    # Arguments of events, and values in states.
    "BatchData", "BatchOutput", "Count", "Failure", "Index", "JsonObject", "MetricValue", "Phase", "Picture",
    "StateDict", "Tree",
    # The default callbacks, a seam; callbacks of which others are kinds.
    "DEFAULTS", "LogMetricsCallback", "MetricWatcher", "ProgressBarCallback",
    # Runs: what is due, recorded, listened to, shown.
    "CountedRun", "ExpectedMetrics", "Interval", "NewMetrics", "Ranks", "current_rates", "describe_fractions",
    "epoch_of", "parse_interval", "rates_change_in_each_update", "set_listening", "sync_ddp_buffers",
    # Checks of arguments.
    "add_note", "check_bool", "check_choice", "check_positive_number", "did_you_mean", "missing_extension_text",
    "optional", "suggest_arguments",
    # Models, their outputs and gradients.
    "Classification", "NamedMetric", "ParamGroup", "TrainerOptimizer", "are_sharded", "class_of",
    "dataset_of", "default_transform", "evaluating_optimizers", "find_length", "group_names", "inference",
    "is_created", "is_frozen_and_quantised", "is_list_of_samples", "is_number", "keep_in_eval", "derive_seed",
    "parts_of_optimizer", "preserving_generators", "preserving_modes", "release_from_eval", "reshard",
    "schedulers_in", "seed_all", "slice_batch", "to_cpu", "total_norm", "unwrap",
    # Devices without waiting.
    "AsyncCopy", "accumulation_dtype", "is_asynchronous", "mixed_precision", "record_event", "to_float",
    # Files.
    "BackgroundWriter", "FROZEN", "StrPath", "check_has_trainable", "check_states_are_possible", "full_state_dict",
    "is_quantised_by", "leave_out_frozen", "load_plain", "model_checksums", "open_store", "parse_location",
    "plain_parts", "quantised_entries", "refuse_engines", "refuse_fsdp1", "remove_old_states", "sharded_like",
    "state_name", "weight_checksums", "without_compile", "write_bytes",
    # Terminals and notebooks.
    "Bar", "NotebookBar", "NotebookOutput", "TerminalBar", "align", "as_number_or_text",
    "as_plain", "format_duration", "html_table", "in_notebook", "is_terminal", "short_repr", "shows_live",
    "to_number", "escape_unprintable", "wrapped",
]  # fmt: skip
