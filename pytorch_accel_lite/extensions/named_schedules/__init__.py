"""The schedules with a warm-up, a stable phase and a decay, also by name; the model before and after each decay."""

from pytorch_accel_lite.extension_tools.schedules import NAMED_SCHEDULES
from pytorch_accel_lite.extensions.named_schedules.schedules_by_name import schedule_by_name
from pytorch_accel_lite.extensions.named_schedules.warmup_stable_decay import (
    DECAYS,
    WSDLrScheduler,
    estimate_checkpoint_steps,
)

__all__ = ["DECAYS", "WSDLrScheduler", "estimate_checkpoint_steps"]

NAMED_SCHEDULES.fill(schedule_by_name)
