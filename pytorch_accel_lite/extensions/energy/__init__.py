"""The energy that a job takes, and what it costs."""

from pytorch_accel_lite.extensions.energy.energy_callback import EnergyCallback

__all__ = ["EnergyCallback"]
