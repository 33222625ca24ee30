"""Samples, tokens and FLOPs per second, and the share of the peak of the devices."""

from pytorch_accel_lite.extensions.throughput.throughput_callback import ThroughputCallback

__all__ = ["ThroughputCallback"]
