"""Path of cosine annealing, as in pytorch-accelerated: see ``extensions/named_schedules/cosine_annealing.py``."""

from typing import TYPE_CHECKING

from pytorch_accel_lite.base.missing_extensions import missing_names_in
from pytorch_accel_lite.extensions.named_schedules import CosineLrScheduler

__all__ = ["CosineLrScheduler"]

if not TYPE_CHECKING:  # otherwise, a type checker would accept any name
    __getattr__ = missing_names_in("schedulers.cosine_scheduler")
