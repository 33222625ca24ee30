"""Experiments: runs that are described in a file and started from the command line, and series of them.

The rest of the package only re-exports names from here.
"""

from __future__ import annotations

from pytorch_accel_lite.extensions.experiment.cross_validation import CrossValidation, Fold, cross_validate
from pytorch_accel_lite.extensions.experiment.experiment import Experiment
from pytorch_accel_lite.extensions.experiment.optuna_search import retry_killed_trials, suggest_overrides
from pytorch_accel_lite.extensions.experiment.run_comparison import RunComparison, compare_runs
from pytorch_accel_lite.extensions.experiment.seed_comparison import MeanDifference, SeedComparison, compare_seeds
from pytorch_accel_lite.extensions.experiment.testing import run_tests
from pytorch_accel_lite.extensions.experiment.yaml_files import ExperimentError, load_yaml

__all__ = [
    "CrossValidation", "Experiment", "ExperimentError", "Fold", "MeanDifference", "RunComparison", "SeedComparison",
    "compare_runs", "compare_seeds", "cross_validate", "load_yaml", "retry_killed_trials", "run_tests",
    "suggest_overrides",
]  # fmt: skip
