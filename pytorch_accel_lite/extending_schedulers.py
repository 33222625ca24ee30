"""Names for extensions of ``schedulers``, besides the names for users. They come from layers below the data."""

from pytorch_accel_lite.base.argument_checks import check_choice, check_int, check_positive_int, check_range
from pytorch_accel_lite.base.types import StateDict
from pytorch_accel_lite.base.user_warnings import warn_outside
from pytorch_accel_lite.schedulers.placeholders import TrainerPlaceholderValues, Unresolved
from pytorch_accel_lite.schedulers.schedule_arguments import NAMED_SCHEDULES, ScheduleName
from pytorch_accel_lite.schedulers.scheduler_base import RUN_EPOCHS, UPDATES_PER_EPOCH, PlannedLrScheduler

__all__ = [
    # Schedules, also by name, and the lengths of a run.
    "NAMED_SCHEDULES", "PlannedLrScheduler", "RUN_EPOCHS", "ScheduleName", "TrainerPlaceholderValues",
    "UPDATES_PER_EPOCH", "Unresolved",
    # States, and arguments.
    "StateDict", "check_choice", "check_int", "check_positive_int", "check_range", "warn_outside",
]  # fmt: skip
