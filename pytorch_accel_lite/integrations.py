"""Public path of the callbacks for clusters that runs take part in."""

from pytorch_accel_lite.callbacks.ray_train import RayReportCallback

__all__ = ["RayReportCallback"]
