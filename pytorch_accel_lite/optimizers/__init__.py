"""Optimizers (one, or several as one), and their learning rates."""

from typing import TYPE_CHECKING

from pytorch_accel_lite.base.missing_extensions import missing_names_in
from pytorch_accel_lite.extensions.muon import ParameterKinds, muon_with_adamw, split_parameters
from pytorch_accel_lite.optimizers.combined_optimizers import CombinedOptimizer, CombinedScheduler

__all__ = ["CombinedOptimizer", "CombinedScheduler", "ParameterKinds", "muon_with_adamw", "split_parameters"]

if not TYPE_CHECKING:  # otherwise, a type checker would accept any name
    __getattr__ = missing_names_in("optimizers")
