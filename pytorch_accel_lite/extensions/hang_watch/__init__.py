"""Detecting hangs: a thread in each process reports which process waits for which, and where each of them is."""

from pytorch_accel_lite.extending import OBSERVERS
from pytorch_accel_lite.extensions.hang_watch.hang_watch_callback import HangWatchCallback
from pytorch_accel_lite.extensions.hang_watch.job_observer import JobObserver
from pytorch_accel_lite.extensions.hang_watch.waiting_threads import is_waiting

__all__ = ["HangWatchCallback", "is_waiting"]

OBSERVERS.append(JobObserver())
