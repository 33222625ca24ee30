"""Learning rate schedulers that torch lacks, which are stepped once per update; see ``docs/schedulers.md``."""

from __future__ import annotations

from pytorch_accel_lite.base.missing_extensions import add_missing_name_errors
from pytorch_accel_lite.extensions.named_schedules import CosineLrScheduler, WSDLrScheduler
from pytorch_accel_lite.extensions.schedule_preview import schedule_values
from pytorch_accel_lite.schedulers.schedule_arguments import ScheduleName, resolve_names
from pytorch_accel_lite.schedulers.scheduler_base import SchedulerBase, StatefulSchedulerBase

__all__ = [
    "CosineLrScheduler",
    "ScheduleName",
    "SchedulerBase",
    "StatefulSchedulerBase",
    "WSDLrScheduler",
    "resolve_names",
    "schedule_values",
]

add_missing_name_errors(__name__)
