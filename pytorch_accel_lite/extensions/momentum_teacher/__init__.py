"""A copy of the model that follows it slowly and takes part in training."""

from pytorch_accel_lite.extensions.momentum_teacher.momentum_teacher_callback import MomentumTeacherCallback

__all__ = ["MomentumTeacherCallback"]
