"""The processes of a job: what they tell each other, the model that they share, how the job is started and left."""

from pytorch_accel_lite.distributed.ranks import Ranks

__all__ = ["Ranks"]
