"""Slurm: jobs that return to its queue, for ``SaveTrainingStateCallback(requeue=True)``."""

from pytorch_accel_lite.extending import JOB_QUEUES
from pytorch_accel_lite.extensions.slurm.slurm_queue import Slurm

__all__ = ["Slurm"]

JOB_QUEUES["Slurm"] = Slurm()
