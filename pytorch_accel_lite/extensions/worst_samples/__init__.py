"""Finding the samples of an evaluation with the largest losses."""

from pytorch_accel_lite.extensions.worst_samples.worst_samples_callback import WorstSample, WorstSamplesCallback

__all__ = ["WorstSample", "WorstSamplesCallback"]
