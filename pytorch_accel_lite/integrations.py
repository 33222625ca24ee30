"""Public path of the callbacks for clusters and for searches that runs take part in."""

from pytorch_accel_lite.callbacks.optuna_pruning import OptunaPruningCallback
from pytorch_accel_lite.callbacks.ray_train import RayReportCallback

__all__ = ["OptunaPruningCallback", "RayReportCallback"]
