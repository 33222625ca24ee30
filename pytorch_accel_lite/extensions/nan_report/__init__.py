"""Finding the origin of a loss or gradient that is not finite, and repeating its step."""

from pytorch_accel_lite.extensions.nan_report.nan_report_callback import NaNReportCallback

__all__ = ["NaNReportCallback"]
