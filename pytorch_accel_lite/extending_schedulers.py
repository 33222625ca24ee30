"""What extensions of ``schedulers`` are written with, in one list: ``extension_tools`` has it by subject."""

from pytorch_accel_lite.extension_tools.arguments_and_errors import *
from pytorch_accel_lite.extension_tools.plain_types import *
from pytorch_accel_lite.extension_tools.schedules import *

__all__ = [
    "NAMED_SCHEDULES", "PlannedLrScheduler", "RUN_EPOCHS", "ScheduleName", "StateDict", "TrainerPlaceholderValues",
    "UPDATES_PER_EPOCH", "Unresolved", "check_choice", "check_int", "check_positive_int", "check_range",
    "warn_outside",
]  # fmt: skip
