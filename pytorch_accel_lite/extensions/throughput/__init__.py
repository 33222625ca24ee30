"""Samples, tokens and FLOPs per second, and the share of the peak of the devices."""

from pytorch_accel_lite.extending import MONITORS
from pytorch_accel_lite.extensions.throughput.throughput_callback import ThroughputCallback

__all__ = ["ThroughputCallback"]

MONITORS["samples_per_second"] = ("throughput", "samples per second")
MONITORS["items_per_second"] = ("throughput of items", "items per second")
MONITORS["flops_per_second"] = ("throughput of FLOPs", "FLOPs per second")
MONITORS["mfu"] = ("FLOPs utilisation", "share of the peak")
