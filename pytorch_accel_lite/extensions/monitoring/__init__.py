"""Monitors of a run: learning rates, gradient norms, the loss scale, the memory of devices.

Each records values per epoch in the run history. Values per update, if it has any, are in ``trainer.step_metrics`` for
loggers. No step reads from the device, except with ``LossScaleCallback``.
"""

from __future__ import annotations

from pytorch_accel_lite.extensions.monitoring.device_memory_callback import DeviceMemoryCallback
from pytorch_accel_lite.extensions.monitoring.gradient_norm_callback import GradientNormCallback
from pytorch_accel_lite.extensions.monitoring.gradient_norms import GradientNorms
from pytorch_accel_lite.extensions.monitoring.learning_rate_callback import LearningRateMonitorCallback
from pytorch_accel_lite.extensions.monitoring.loss_scale_callback import LossScaleCallback

__all__ = [
    "DeviceMemoryCallback",
    "GradientNormCallback",
    "GradientNorms",
    "LearningRateMonitorCallback",
    "LossScaleCallback",
]
