"""The processes of a job: communication, who reads which data, observers, lost processes, launch and shutdown."""

from pytorch_accel_lite.distributed.ranks import Ranks

__all__ = ["Ranks"]
