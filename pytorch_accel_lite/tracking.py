"""Public path of the progress of a run and of running losses."""

from pytorch_accel_lite.run.metrics.history import InMemoryRunHistory, RunHistory
from pytorch_accel_lite.run.metrics.losses import LossTracker, LossTrackers
from pytorch_accel_lite.run.run_parts.progress import Progress

__all__ = ["InMemoryRunHistory", "LossTracker", "LossTrackers", "Progress", "RunHistory"]
