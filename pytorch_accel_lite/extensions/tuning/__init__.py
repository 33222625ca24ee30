"""Finding settings by trial: a learning rate, a batch size, and what limits the speed of training."""

from __future__ import annotations

from pytorch_accel_lite.extensions.tuning.diagnosis import Diagnosis
from pytorch_accel_lite.extensions.tuning.lr_finder import LearningRates

__all__ = ["Diagnosis", "LearningRates"]
