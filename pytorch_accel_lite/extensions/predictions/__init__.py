"""Predictions on a disk, written while they are made."""

from pytorch_accel_lite.extensions.predictions.prediction_shards import iterate_predictions, read_predictions
from pytorch_accel_lite.extensions.predictions.prediction_writer_callback import PredictionWriterCallback

__all__ = ["PredictionWriterCallback", "iterate_predictions", "read_predictions"]
