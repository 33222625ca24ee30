"""Trying the evaluation on one batch before the first update."""

from pytorch_accel_lite.extending import TRAINING_CHECKS
from pytorch_accel_lite.extensions.sanity_check.evaluation_check import TriesEvaluation, check_evaluation

__all__ = ["TriesEvaluation"]

TRAINING_CHECKS.append(check_evaluation)
