"""What extensions look for in a training run: mistakes of a program that is not wrong as such."""

from __future__ import annotations

from torch import nn

from pytorch_accel_lite.data import Batch
from pytorch_accel_lite.data.sources import BatchOutput
from pytorch_accel_lite.optimizers.param_group_options import Options
from pytorch_accel_lite.run.run import Run, TrainerLike


class RunChecks:
    """Checks at some points of a training run. Each may warn, print, or raise an error, which ends the run.

    This class checks nothing. An extension adds an object of a subclass to ``RUN_CHECKS``.
    """

    def check_optimizer(self, trainer: TrainerLike, optimized: set[nn.Parameter]) -> None:
        """Called before a run, or once a factory has created the optimizer.

        Args:
            optimized: the parameters of all optimizers, those in attributes included
        """

    def check_schedule(self, trainer: TrainerLike, run: Run, initial: Options | None) -> None:
        """Called when the run has its scheduler, or none.

        Args:
            initial: the options of the optimizer from before any schedule, if the run begins with them, or has no
                scheduler and might; ``None`` also for a run that is resumed
        """

    def check_before_training(self, trainer: TrainerLike, run: Run) -> None:
        """Called before the first update, when the starting events have fired."""

    def check_first_batch(self, trainer: TrainerLike, batch: Batch, output: BatchOutput) -> None:
        """Called on the first process with the first training batch that it reads, before its backward pass."""


#: The checks of training runs, in the order in which they are made.
RUN_CHECKS: list[RunChecks] = []
