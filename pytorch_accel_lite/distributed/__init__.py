"""The processes of a job: communication, the shared model, launch and shutdown."""

from pytorch_accel_lite.distributed.ranks import Ranks

__all__ = ["Ranks"]
