"""What extensions are written with, besides what users have: the run, and the seams at which it can be changed."""

from pytorch_accel_lite.base.environment import warn_outside
from pytorch_accel_lite.base.types import JsonObject
from pytorch_accel_lite.base.validation import check_positive_int
from pytorch_accel_lite.checkpoint.locations import STORES, Store, read_state
from pytorch_accel_lite.checkpoint.manifest import catch_damage, manifest_text, read_manifest
from pytorch_accel_lite.checkpoint.store import StateStore
from pytorch_accel_lite.checkpoint.training_state import CapturedState, read_model, read_verified, write_files
from pytorch_accel_lite.distributed import Ranks
from pytorch_accel_lite.run.events import RunInterruptedError, StopTrainingError, TrainerCallback
from pytorch_accel_lite.run.job_queues import JOB_QUEUES, JobQueue
from pytorch_accel_lite.run.parts import TrainingState
from pytorch_accel_lite.run.settings import RunRequest
from pytorch_accel_lite.run.state import Run, Step, TrainerLike
from pytorch_accel_lite.run.watched_metric import WatchedMetric

__all__ = [
    # The run, and what is written for it.
    "Ranks", "Run", "RunInterruptedError", "RunRequest", "Step", "StopTrainingError", "TrainerCallback", "TrainerLike",
    "TrainingState", "WatchedMetric",
    # Seams.
    "JOB_QUEUES", "JobQueue", "STORES", "StateStore", "Store",
    # What stores are written with.
    "CapturedState", "JsonObject", "catch_damage", "manifest_text", "read_manifest", "read_model", "read_state",
    "read_verified", "write_files",
    # Help.
    "check_positive_int", "warn_outside",
]  # fmt: skip
