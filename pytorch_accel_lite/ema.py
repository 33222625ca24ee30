"""Public path of averages of weights."""

from pytorch_accel_lite.optimizers.moving_averages import ModelEma

__all__ = ["ModelEma"]
