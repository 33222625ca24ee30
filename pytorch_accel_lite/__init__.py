"""A small, exact, callback-driven trainer for PyTorch over Hugging Face Accelerate."""

from typing import TYPE_CHECKING

from accelerate import notebook_launcher

from pytorch_accel_lite.callbacks import (
    CallbackHandler,
    NonFiniteLossError,
    StopTrainingError,
    TrainerCallback,
    get_default_callbacks,
)
from pytorch_accel_lite.history import InMemoryRunHistory, RunHistory
from pytorch_accel_lite.lazy import loaded_when_named
from pytorch_accel_lite.run_config import TrainerRunConfig
from pytorch_accel_lite.tracking import LossTracker, Progress
from pytorch_accel_lite.trainer import Trainer

if TYPE_CHECKING:
    from pytorch_accel_lite.experiment.comparison import compare_runs
    from pytorch_accel_lite.experiment.cross_validation import cross_validate
    from pytorch_accel_lite.placeholders import TrainerPlaceholderValues
    from pytorch_accel_lite.timm_trainer import TrainerWithTimmScheduler

__version__ = "0.2.0"

__all__ = [
    "CallbackHandler",
    "InMemoryRunHistory",
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
    "cross_validate",
    "get_default_callbacks",
    "notebook_launcher",
]

__getattr__ = loaded_when_named(
    __name__,
    {
        "TrainerPlaceholderValues": "pytorch_accel_lite.placeholders",
        "TrainerWithTimmScheduler": "pytorch_accel_lite.timm_trainer",
        "compare_runs": "pytorch_accel_lite.experiment.comparison",
        "cross_validate": "pytorch_accel_lite.experiment.cross_validation",
    },
)
