"""Path of cosine annealing, as in pytorch-accelerated: see ``extensions/named_schedules/cosine_annealing.py``."""

from pytorch_accel_lite.base.missing_extensions import add_missing_name_errors
from pytorch_accel_lite.extensions.named_schedules import CosineLrScheduler

__all__ = ["CosineLrScheduler"]

add_missing_name_errors(__name__)
