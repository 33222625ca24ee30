"""Gradients that are computed several times in an update: LBFGS, and schemes such as SAM."""

from pytorch_accel_lite.extending import STEP_KINDS
from pytorch_accel_lite.extensions.closures.replaying_step import ReplayingStep

__all__ = ["ReplayingStep"]

STEP_KINDS.append(ReplayingStep)
