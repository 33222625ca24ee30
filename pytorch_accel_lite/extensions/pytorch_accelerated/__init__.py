"""What pytorch-accelerated has besides its trainer: limits of batches, functions of one process, and names."""

from pytorch_accel_lite.extension_tools.metrics_and_callbacks import ADDED_TO_EACH_TRAINER
from pytorch_accel_lite.extensions.pytorch_accelerated.imported_names import (
    CallbackMethodNotImplementedError,
    DataLoaderSlice,
    worker_init_fn,
)
from pytorch_accel_lite.extensions.pytorch_accelerated.limit_batches_callback import (
    LIMIT_BATCHES_ENV_VAR,
    LimitBatches,
    LimitBatchesCallback,
    LimitEvalStepsCallback,
    limit_from_environment,
)
from pytorch_accel_lite.extensions.pytorch_accelerated.process_decorators import (
    local_process_zero_first,
    local_process_zero_only,
    world_process_zero_only,
)

__all__ = [
    "LIMIT_BATCHES_ENV_VAR",
    "CallbackMethodNotImplementedError",
    "DataLoaderSlice",
    "LimitBatches",
    "LimitBatchesCallback",
    "LimitEvalStepsCallback",
    "local_process_zero_first",
    "local_process_zero_only",
    "worker_init_fn",
    "world_process_zero_only",
]

ADDED_TO_EACH_TRAINER.append(limit_from_environment)
