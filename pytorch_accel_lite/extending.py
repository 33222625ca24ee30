"""What extensions are written with, besides what users have: the run, and the seams at which it can be changed."""

from pytorch_accel_lite.base.environment import warn_outside
from pytorch_accel_lite.base.validation import check_positive_int
from pytorch_accel_lite.checkpoint.remote import read_state
from pytorch_accel_lite.run.events import RunInterruptedError, StopTrainingError, TrainerCallback
from pytorch_accel_lite.run.job_queues import JOB_QUEUES, JobQueue
from pytorch_accel_lite.run.parts import TrainingState
from pytorch_accel_lite.run.settings import RunRequest
from pytorch_accel_lite.run.state import Run, Step, TrainerLike
from pytorch_accel_lite.run.watched_metric import WatchedMetric

__all__ = [
    # The run, and what is written for it.
    "Run", "RunInterruptedError", "RunRequest", "Step", "StopTrainingError", "TrainerCallback", "TrainerLike",
    "TrainingState", "WatchedMetric",
    # Seams.
    "JOB_QUEUES", "JobQueue",
    # Help.
    "check_positive_int", "read_state", "warn_outside",
]  # fmt: skip
