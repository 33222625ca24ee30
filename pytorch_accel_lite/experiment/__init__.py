"""Experiments: runs that are described in a file and started from the command line, and series of them.

Nothing here is imported by the rest of the package.
"""

from __future__ import annotations

from pytorch_accel_lite.experiment.experiment import Experiment
from pytorch_accel_lite.experiment.files import ExperimentError
from pytorch_accel_lite.experiment.launching import LaunchError, launch
from pytorch_accel_lite.experiment.search import OptunaPruningCallback, suggest_overrides
from pytorch_accel_lite.experiment.testing import run_tests

__all__ = [
    "Experiment",
    "ExperimentError",
    "LaunchError",
    "OptunaPruningCallback",
    "launch",
    "run_tests",
    "suggest_overrides",
]
