"""Learning rate schedulers that torch lacks, which are stepped once per update; see ``docs/schedulers.md``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytorch_accel_lite.base.missing_extensions import missing_names_in
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

if not TYPE_CHECKING:  # otherwise, a type checker would accept any name
    __getattr__ = missing_names_in("schedulers")
