"""Public path of helpers: limits, a single process of a job, averages of weights, optional packages, texts."""

from pytorch_accel_lite.base.display import format_metric, listed
from pytorch_accel_lite.base.missing_extensions import add_missing_name_errors
from pytorch_accel_lite.base.optional_packages import import_extra
from pytorch_accel_lite.distributed.launched_processes import record_error
from pytorch_accel_lite.extension_tools.arguments_and_errors import suggest
from pytorch_accel_lite.extension_tools.processes import result_of_first
from pytorch_accel_lite.extension_tools.texts_and_pages import as_cell, as_json, format_bytes, format_value, from_cell
from pytorch_accel_lite.extensions.idle_gpus import use_idle_gpus
from pytorch_accel_lite.extensions.model_ema import ModelEma
from pytorch_accel_lite.extensions.pytorch_accelerated import (
    LIMIT_BATCHES_ENV_VAR,
    DataLoaderSlice,
    LimitBatches,
    local_process_zero_first,
    local_process_zero_only,
    worker_init_fn,
    world_process_zero_only,
)
from pytorch_accel_lite.trainer_methods.gather_and_broadcast import remove_padding

__all__ = [
    "LIMIT_BATCHES_ENV_VAR",
    "DataLoaderSlice",
    "LimitBatches",
    "ModelEma",
    "as_cell",
    "as_json",
    "format_bytes",
    "format_metric",
    "format_value",
    "from_cell",
    "import_extra",
    "listed",
    "local_process_zero_first",
    "local_process_zero_only",
    "record_error",
    "remove_padding",
    "result_of_first",
    "suggest",
    "use_idle_gpus",
    "worker_init_fn",
    "world_process_zero_only",
]

add_missing_name_errors(__name__)
