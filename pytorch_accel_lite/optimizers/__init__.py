"""Optimizers (one, or several as one), their learning rates and gradients, groups of layers, averages of weights."""

from pytorch_accel_lite.optimizers.combined import CombinedOptimizer, CombinedScheduler

__all__ = ["CombinedOptimizer", "CombinedScheduler"]
