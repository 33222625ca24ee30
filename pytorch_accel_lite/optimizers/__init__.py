"""Optimizers (one, or several as one), and their learning rates."""

from pytorch_accel_lite.base.missing_extensions import add_missing_name_errors
from pytorch_accel_lite.extensions.muon import ParameterKinds, muon_with_adamw, split_parameters
from pytorch_accel_lite.optimizers.combined_optimizers import CombinedOptimizer, CombinedScheduler

__all__ = ["CombinedOptimizer", "CombinedScheduler", "ParameterKinds", "muon_with_adamw", "split_parameters"]

add_missing_name_errors(__name__)
