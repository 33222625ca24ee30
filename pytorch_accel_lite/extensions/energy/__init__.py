"""Measuring the energy that a job takes, and its cost."""

from pytorch_accel_lite.extensions.energy.energy_callback import EnergyCallback

__all__ = ["EnergyCallback"]
