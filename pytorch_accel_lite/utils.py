"""Public path of helpers for limits, for a single process of a job, and for averages of weights."""

from pytorch_accel_lite.base.environment import LIMIT_BATCHES_VARIABLE
from pytorch_accel_lite.base.helpers import (
    DataLoaderSlice,
    LimitBatches,
    local_process_zero_first,
    local_process_zero_only,
    remove_padding,
    worker_init_fn,
    world_process_zero_only,
)
from pytorch_accel_lite.optimizers.weight_averages import ModelEma

LIMIT_BATCHES_ENV_VAR = LIMIT_BATCHES_VARIABLE  # the name in pytorch-accelerated

__all__ = [
    "LIMIT_BATCHES_ENV_VAR",
    "DataLoaderSlice",
    "LimitBatches",
    "ModelEma",
    "local_process_zero_first",
    "local_process_zero_only",
    "remove_padding",
    "worker_init_fn",
    "world_process_zero_only",
]
