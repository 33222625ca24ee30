"""Ray: runs that Ray Train starts and restarts."""

from pytorch_accel_lite.extensions.ray.report_callback import RayReportCallback

__all__ = ["RayReportCallback"]
