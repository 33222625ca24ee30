"""Public path of experiments: runs that are described in a file, and series of them."""

from pytorch_accel_lite.extensions.experiment import (
    CrossValidation,
    Experiment,
    ExperimentError,
    Fold,
    MeanDifference,
    RunComparison,
    SeedComparison,
    compare_runs,
    compare_seeds,
    cross_validate,
    load_yaml,
    retry_killed_trials,
    run_tests,
    suggest_overrides,
)
from pytorch_accel_lite.extensions.optuna import OptunaPruningCallback

__all__ = [
    "CrossValidation",
    "Experiment",
    "ExperimentError",
    "Fold",
    "MeanDifference",
    "OptunaPruningCallback",
    "RunComparison",
    "SeedComparison",
    "compare_runs",
    "compare_seeds",
    "cross_validate",
    "load_yaml",
    "retry_killed_trials",
    "run_tests",
    "suggest_overrides",
]
