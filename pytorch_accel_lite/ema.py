"""Public path of averages of weights."""

from pytorch_accel_lite.base.missing_extensions import add_missing_name_errors
from pytorch_accel_lite.extensions.model_ema import ModelEma

__all__ = ["ModelEma"]

add_missing_name_errors(__name__)
