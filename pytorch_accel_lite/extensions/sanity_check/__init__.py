"""Trying the evaluation on one batch before the first update."""

from pytorch_accel_lite.extending import RUN_CHECKS
from pytorch_accel_lite.extensions.sanity_check.evaluation_check import TriesEvaluation, check_evaluation

__all__ = ["TriesEvaluation"]

RUN_CHECKS.before_training.append(check_evaluation)
