"""Which process waits for which, in a thread of each process, and where each is if a run makes no progress."""

from pytorch_accel_lite.extending import OBSERVERS
from pytorch_accel_lite.extensions.hang_watch.hang_watch_callback import HangWatchCallback
from pytorch_accel_lite.extensions.hang_watch.job_observer import WatchOfJob
from pytorch_accel_lite.extensions.hang_watch.waits import is_waiting

__all__ = ["HangWatchCallback", "is_waiting"]

OBSERVERS.append(WatchOfJob())
