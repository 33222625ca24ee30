"""The schedules of this package, cosine and warm-up, stable, decay, and all by name; the model around each decay."""

from pytorch_accel_lite.extension_tools.schedules import NAMED_SCHEDULES
from pytorch_accel_lite.extensions.named_schedules.cosine_annealing import CosineLrScheduler
from pytorch_accel_lite.extensions.named_schedules.schedules_by_name import schedule_by_name
from pytorch_accel_lite.extensions.named_schedules.warmup_stable_decay import (
    DECAYS,
    WSDLrScheduler,
    estimate_checkpoint_steps,
)

__all__ = ["DECAYS", "CosineLrScheduler", "WSDLrScheduler", "estimate_checkpoint_steps"]

NAMED_SCHEDULES.fill(schedule_by_name)
