"""Mixtures whose weights change from epoch to epoch."""

from pytorch_accel_lite.extensions.mixture_schedule.mixture_schedule import MixtureScheduleCallback

__all__ = ["MixtureScheduleCallback"]
