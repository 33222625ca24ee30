"""Public path of the progress of a run and of running losses."""

from pytorch_accel_lite.run.history import InMemoryRunHistory, RunHistory
from pytorch_accel_lite.run.losses import LossTracker, LossTrackers
from pytorch_accel_lite.run.progress import Progress

__all__ = ["InMemoryRunHistory", "LossTracker", "LossTrackers", "Progress", "RunHistory"]
