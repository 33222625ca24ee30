"""The rates of a schedule without training: what plots and checks of schedules show."""

from pytorch_accel_lite.extensions.schedule_preview.previewed_rates import schedule_values

__all__ = ["schedule_values"]
