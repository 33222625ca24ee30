"""Estimating the memory that training takes on any number of devices, without having these devices."""

from __future__ import annotations

from pytorch_accel_lite.extensions.memory_estimate.estimate import MemoryEstimate

__all__ = ["MemoryEstimate"]
