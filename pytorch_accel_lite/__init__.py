"""An exact, callback-driven trainer for PyTorch over Hugging Face Accelerate."""

from pytorch_accel_lite.base.intervals import Interval
from pytorch_accel_lite.base.placeholders import TrainerPlaceholderValues
from pytorch_accel_lite.base.progress import Progress
from pytorch_accel_lite.base.run_settings import TrainerRunConfig
from pytorch_accel_lite.callbacks import (
    CallbackHandler,
    NonFiniteLossError,
    StopTrainingError,
    TrainerCallback,
    get_default_callbacks,
)
from pytorch_accel_lite.distributed.launch import notebook_launcher
from pytorch_accel_lite.engine.history import InMemoryRunHistory, RunHistory
from pytorch_accel_lite.engine.losses import LossTracker
from pytorch_accel_lite.extensions.experiment import compare_runs, compare_seeds, cross_validate
from pytorch_accel_lite.trainer import Trainer, TrainerWithTimmScheduler

__version__ = "0.2.0"

__all__ = [
    "CallbackHandler",
    "InMemoryRunHistory",
    "Interval",
    "LossTracker",
    "NonFiniteLossError",
    "Progress",
    "RunHistory",
    "StopTrainingError",
    "Trainer",
    "TrainerCallback",
    "TrainerPlaceholderValues",
    "TrainerRunConfig",
    "TrainerWithTimmScheduler",
    "compare_runs",
    "compare_seeds",
    "cross_validate",
    "get_default_callbacks",
    "notebook_launcher",
]
