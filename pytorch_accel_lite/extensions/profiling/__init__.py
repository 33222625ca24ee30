"""How the time of a run is spent: by phase and callback, and traces of operations."""

from pytorch_accel_lite.extending import MONITORS
from pytorch_accel_lite.extensions.profiling.device_timer import DeviceTimer, Moment
from pytorch_accel_lite.extensions.profiling.profiler_callback import ProfilerCallback
from pytorch_accel_lite.extensions.profiling.timing_callback import TimingCallback

__all__ = ["DeviceTimer", "Moment", "ProfilerCallback", "TimingCallback"]

MONITORS["time"] = ("time of an epoch", "seconds")
