"""Public path of averages of weights."""

from typing import TYPE_CHECKING

from pytorch_accel_lite.base.missing_extensions import missing_names_in
from pytorch_accel_lite.extensions.model_ema import ModelEma

__all__ = ["ModelEma"]

if not TYPE_CHECKING:  # otherwise, a type checker would accept any name
    __getattr__ = missing_names_in("ema")
