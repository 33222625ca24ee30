"""Detecting hangs: a thread in each process reports which process waits for which, and where each of them is.

Two threads watch. ``job_watch.py`` watches every job of several processes, by default, for processes that wait for
each other. ``run_watch.py`` watches a single run for ``HangWatchCallback``, also on one process, for a time without any
step, whatever the reason.
"""

from pytorch_accel_lite.extending import OBSERVERS
from pytorch_accel_lite.extensions.hang_watch.hang_watch_callback import HangWatchCallback
from pytorch_accel_lite.extensions.hang_watch.job_observer import JobObserver
from pytorch_accel_lite.extensions.hang_watch.waiting_threads import is_waiting

__all__ = ["HangWatchCallback", "is_waiting"]

OBSERVERS.append(JobObserver())
