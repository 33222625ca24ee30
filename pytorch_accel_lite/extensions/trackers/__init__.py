"""Numbers of runs in TensorBoard, Weights & Biases, MLflow and other trackers."""

from pytorch_accel_lite.extensions.trackers.tracker_callback import TrackerCallback

__all__ = ["TrackerCallback"]
