"""Public path of the callbacks for clusters and for searches that runs take part in."""

from pytorch_accel_lite.base.missing_extensions import add_missing_name_errors
from pytorch_accel_lite.extensions.optuna import OptunaPruningCallback
from pytorch_accel_lite.extensions.ray import RayReportCallback

__all__ = ["OptunaPruningCallback", "RayReportCallback"]

add_missing_name_errors(__name__)
