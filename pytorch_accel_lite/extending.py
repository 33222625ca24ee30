"""What extensions are written with, besides what users have: the run, and the seams at which it can be changed."""

from pytorch_accel_lite.run.settings import RunRequest
from pytorch_accel_lite.run.state import Run, Step, TrainerLike

__all__ = ["Run", "RunRequest", "Step", "TrainerLike"]
