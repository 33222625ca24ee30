"""Public path of averages of weights."""

from typing import TYPE_CHECKING

from pytorch_accel_lite.base.missing_extensions import missing_name_error
from pytorch_accel_lite.extensions.model_ema import ModelEma

__all__ = ["ModelEma"]

if not TYPE_CHECKING:  # otherwise, a type checker would accept any name

    def __getattr__(name: str) -> object:
        raise missing_name_error(name, "ema")
