"""How fast a run is, and what takes its time: throughput, FLOPs, phases, traces of the profiler."""

from pytorch_accel_lite.extensions.performance.throughput_callback import ThroughputCallback
from pytorch_accel_lite.extensions.performance.timing_callback import ProfilerCallback, TimingCallback

__all__ = ["ProfilerCallback", "ThroughputCallback", "TimingCallback"]
