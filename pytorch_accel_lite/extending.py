"""What extensions are written with, besides what users have: the run, and the seams at which it can be changed."""

from pytorch_accel_lite.base.randomness import capture_generators, restore_generators
from pytorch_accel_lite.data import Batch
from pytorch_accel_lite.data.batches import BatchOutput
from pytorch_accel_lite.distributed import Ranks
from pytorch_accel_lite.distributed.exchange import ControlGroup
from pytorch_accel_lite.distributed.positions import MACHINERY, is_waiting
from pytorch_accel_lite.distributed.ranks import use_ranks
from pytorch_accel_lite.distributed.shutdown import open_trainers
from pytorch_accel_lite.run.settings import RunRequest
from pytorch_accel_lite.run.state import Run, Step, TrainerLike
from pytorch_accel_lite.steps.choice import replace_step
from pytorch_accel_lite.steps.logical import SharedLossTrackers
from pytorch_accel_lite.steps.logical_step import LogicalStep, LogicalWindow

__all__ = [
    "MACHINERY",
    "Batch",
    "BatchOutput",
    "ControlGroup",
    "LogicalStep",
    "LogicalWindow",
    "Ranks",
    "Run",
    "RunRequest",
    "SharedLossTrackers",
    "Step",
    "TrainerLike",
    "capture_generators",
    "is_waiting",
    "open_trainers",
    "replace_step",
    "restore_generators",
    "use_ranks",
]
