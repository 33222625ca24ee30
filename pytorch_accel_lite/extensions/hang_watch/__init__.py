"""Reporting where every process is if a run makes no progress."""

from pytorch_accel_lite.extensions.hang_watch.hang_watch_callback import HangWatchCallback

__all__ = ["HangWatchCallback"]
