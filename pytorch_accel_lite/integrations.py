"""Public path of the callbacks for clusters and for searches that runs take part in."""

from typing import TYPE_CHECKING

from pytorch_accel_lite.base.missing_extensions import missing_names_in
from pytorch_accel_lite.extensions.optuna import OptunaPruningCallback
from pytorch_accel_lite.extensions.ray import RayReportCallback

__all__ = ["OptunaPruningCallback", "RayReportCallback"]

if not TYPE_CHECKING:  # otherwise, a type checker would accept any name
    __getattr__ = missing_names_in("integrations")
