"""A small, exact, callback-driven trainer for PyTorch over Hugging Face Accelerate."""

from accelerate import notebook_launcher

from pytorch_accel_lite.callbacks import (
    CallbackHandler,
    NonFiniteLossError,
    StopTrainingError,
    TrainerCallback,
    get_default_callbacks,
)
from pytorch_accel_lite.run_config import TrainerRunConfig
from pytorch_accel_lite.timm_trainer import TrainerWithTimmScheduler
from pytorch_accel_lite.tracking import InMemoryRunHistory, LossTracker, Progress, RunHistory
from pytorch_accel_lite.trainer import Trainer, TrainerPlaceholderValues

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
    "get_default_callbacks",
    "notebook_launcher",
]
