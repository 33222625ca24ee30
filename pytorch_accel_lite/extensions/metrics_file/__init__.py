"""The metrics of a run in a JSON lines or CSV file."""

from pytorch_accel_lite.extensions.metrics_file.metrics_file_callback import MetricsFileCallback

__all__ = ["MetricsFileCallback"]
