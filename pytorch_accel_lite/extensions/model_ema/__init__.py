"""A moving average of the model's weights, which is evaluated and saved."""

from pytorch_accel_lite.extensions.model_ema.model_ema_callback import ModelEmaCallback
from pytorch_accel_lite.extensions.model_ema.moving_averages import ModelEma, ShardedEma

__all__ = ["ModelEma", "ModelEmaCallback", "ShardedEma"]
