"""Logical processes: a job is defined for a number of them, and has the same bits on any number of real processes."""

from pytorch_accel_lite.logical.processes import LogicalProcesses

__all__ = ["LogicalProcesses"]
