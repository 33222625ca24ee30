"""Schedules of resumed runs whose epochs have another number of updates, as on other processes."""

from pytorch_accel_lite.extending import SCHEDULE_RECREATION
from pytorch_accel_lite.extensions.elastic_schedules.schedule_in_other_epochs import resume_schedule

__all__ = ["resume_schedule"]

SCHEDULE_RECREATION.fill(resume_schedule)
