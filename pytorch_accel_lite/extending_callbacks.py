"""What callbacks share, in one list: ``extension_tools`` has it by subject."""

from pytorch_accel_lite.extension_tools.arguments_and_errors import *
from pytorch_accel_lite.extension_tools.data_and_batches import *
from pytorch_accel_lite.extension_tools.metrics_and_callbacks import *
from pytorch_accel_lite.extension_tools.modules_and_devices import *
from pytorch_accel_lite.extension_tools.optimizers_and_gradients import *
from pytorch_accel_lite.extension_tools.plain_types import *
from pytorch_accel_lite.extension_tools.processes import *
from pytorch_accel_lite.extension_tools.random_numbers import *
from pytorch_accel_lite.extension_tools.runs_and_steps import *
from pytorch_accel_lite.extension_tools.states_and_files import *
from pytorch_accel_lite.extension_tools.texts_and_pages import *

suggest_arguments = checked_calls("__init__")  # its earlier name and form

__all__ = [
    "AsyncCopy", "BackgroundWriter", "Bar", "BatchData", "BatchOutput", "Classification", "Count", "CountedRun",
    "DEFAULTS", "ExpectedMetrics", "FROZEN", "Failure", "Index", "Interval", "JsonObject", "LogMetricsCallback",
    "MetricValue", "MetricWatcher", "NamedMetric", "NewMetrics", "NotebookBar", "NotebookOutput", "ParamGroup",
    "Phase", "Picture", "ProgressBarCallback", "Ranks", "StateDict", "StrPath", "TerminalBar", "TrainerOptimizer",
    "Tree", "accumulation_dtype", "add_note", "align", "are_sharded", "as_number_or_text", "as_plain", "check_bool",
    "check_choice", "check_has_trainable", "check_positive_number", "check_states_are_possible", "class_of",
    "current_rates", "dataset_of", "default_transform", "derive_seed", "describe_fractions", "did_you_mean",
    "epoch_of", "escape_unprintable", "evaluating_optimizers", "find_length", "format_duration", "full_state_dict",
    "group_names", "html_table", "in_notebook", "inference", "is_asynchronous", "is_created",
    "is_frozen_and_quantised", "is_list_of_samples", "is_number", "is_quantised_by", "is_terminal", "keep_in_eval",
    "leave_out_frozen", "load_plain", "missing_extension_text", "mixed_precision", "model_checksums", "open_store",
    "optional", "parse_interval", "parse_location", "parts_of_optimizer", "plain_parts", "preserving_generators",
    "preserving_modes", "quantised_entries", "rates_change_in_each_update", "record_event", "refuse_engines",
    "refuse_fsdp1", "release_from_eval", "remove_old_states", "reshard", "schedulers_in", "seed_all", "set_listening",
    "sharded_like", "short_repr", "shows_live", "slice_batch", "state_name", "suggest_arguments", "sync_ddp_buffers",
    "to_cpu", "to_float", "to_number", "total_norm", "unwrap", "weight_checksums", "without_compile", "wrapped",
    "write_bytes",
]  # fmt: skip
