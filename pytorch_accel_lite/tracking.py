"""Public path of the progress of a run and of running losses."""

from pytorch_accel_lite.base.progress import Progress
from pytorch_accel_lite.engine.history import InMemoryRunHistory, RunHistory
from pytorch_accel_lite.engine.losses import LossTracker, LossTrackers

__all__ = ["InMemoryRunHistory", "LossTracker", "LossTrackers", "Progress", "RunHistory"]
