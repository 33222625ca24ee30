"""An exact, callback-driven trainer for PyTorch over Hugging Face Accelerate."""

from pytorch_accel_lite.base.missing_extensions import add_missing_name_errors
from pytorch_accel_lite.callbacks import (
    CallbackHandler,
    NonFiniteLossError,
    StopTrainingError,
    TrainerCallback,
    get_default_callbacks,
)
from pytorch_accel_lite.distributed.launched_processes import notebook_launcher
from pytorch_accel_lite.extensions.experiment import compare_runs, compare_seeds, cross_validate
from pytorch_accel_lite.run.history import InMemoryRunHistory, RunHistory
from pytorch_accel_lite.run.intervals import Interval
from pytorch_accel_lite.run.losses import LossTracker
from pytorch_accel_lite.run.progress import Progress
from pytorch_accel_lite.run.request_and_config import TrainerRunConfig
from pytorch_accel_lite.schedulers.placeholders import TrainerPlaceholderValues
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

add_missing_name_errors(__name__)
