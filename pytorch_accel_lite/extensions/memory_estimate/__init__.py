"""Estimating the memory that training takes on any number of devices, with fake tensors and without the devices."""

from __future__ import annotations

from pytorch_accel_lite.extensions.memory_estimate.estimate import MemoryEstimate

__all__ = ["MemoryEstimate"]
