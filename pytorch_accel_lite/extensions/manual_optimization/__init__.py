"""Training steps of the user's own, an overridden ``train_step``, which update each optimizer when they want to."""

from pytorch_accel_lite.extending import STEP_KINDS
from pytorch_accel_lite.extensions.manual_optimization.manual_step import ManualStep

__all__ = ["ManualStep"]

STEP_KINDS.append(ManualStep)
