"""Learning rate schedulers that torch lacks, which are stepped once per update; see ``docs/schedulers.md``."""

from __future__ import annotations

from pytorch_accel_lite.schedulers.cosine_scheduler import CosineLrScheduler
from pytorch_accel_lite.schedulers.named_schedules import ScheduleName, resolve_names
from pytorch_accel_lite.schedulers.preview import schedule_values
from pytorch_accel_lite.schedulers.scheduler_base import SchedulerBase, StatefulSchedulerBase
from pytorch_accel_lite.schedulers.wsd_scheduler import WSDLrScheduler

__all__ = [
    "CosineLrScheduler",
    "ScheduleName",
    "SchedulerBase",
    "StatefulSchedulerBase",
    "WSDLrScheduler",
    "resolve_names",
    "schedule_values",
]
