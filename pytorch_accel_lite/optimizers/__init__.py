"""Optimizers (one, or several as one), their learning rates and gradients, groups of layers, averages of weights."""

from pytorch_accel_lite.optimizers.combined import CombinedOptimizer, CombinedScheduler
from pytorch_accel_lite.optimizers.muon import ParameterKinds, muon_with_adamw, split_parameters

__all__ = ["CombinedOptimizer", "CombinedScheduler", "ParameterKinds", "muon_with_adamw", "split_parameters"]
