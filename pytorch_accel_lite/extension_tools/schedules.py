"""Learning rate schedules, also by name, and the lengths of a run. Below the data."""

from pytorch_accel_lite.schedulers.placeholders import TrainerPlaceholderValues, Unresolved
from pytorch_accel_lite.schedulers.schedule_arguments import NAMED_SCHEDULES, ScheduleName
from pytorch_accel_lite.schedulers.scheduler_base import RUN_EPOCHS, UPDATES_PER_EPOCH, PlannedLrScheduler

__all__ = [
    "NAMED_SCHEDULES", "PlannedLrScheduler", "RUN_EPOCHS", "ScheduleName", "TrainerPlaceholderValues",
    "UPDATES_PER_EPOCH", "Unresolved",
]  # fmt: skip
