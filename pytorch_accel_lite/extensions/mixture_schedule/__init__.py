"""Mixtures whose weights change by epochs or updates."""

from pytorch_accel_lite.extensions.mixture_schedule.mixture_schedule import MixtureScheduleCallback

__all__ = ["MixtureScheduleCallback"]
