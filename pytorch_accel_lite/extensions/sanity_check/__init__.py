"""Trying the evaluation on one batch before the first update."""

from pytorch_accel_lite.extending import RUN_CHECKS, Run, RunChecks, TrainerLike
from pytorch_accel_lite.extensions.sanity_check.evaluation_check import TriesEvaluation, check_evaluation

__all__ = ["TriesEvaluation"]


class SanityCheck(RunChecks):
    """Tries the evaluation before the first update."""

    def check_before_training(self, trainer: TrainerLike, run: Run) -> None:
        """Try the evaluation on one batch of each dataset."""
        check_evaluation(trainer, run)


RUN_CHECKS.append(SanityCheck())
