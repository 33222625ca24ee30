"""Warnings about mistakes in programs that run: what is trained, at which rate, and with which loss."""

from torch import nn

from pytorch_accel_lite.data import Batch
from pytorch_accel_lite.extending import RUN_CHECKS, BatchOutput, Run, RunChecks, TrainerLike
from pytorch_accel_lite.extension_tools.optimizers_and_gradients import Options
from pytorch_accel_lite.extensions.common_mistakes.first_batch import warn_of_loss
from pytorch_accel_lite.extensions.common_mistakes.ineffective_rates import check_rates
from pytorch_accel_lite.extensions.common_mistakes.untrained_parameters import warn_of_untrained_parameters


class MistakeChecks(RunChecks):
    """Warns of what is probably a mistake. Nothing changes how a run trains."""

    def check_optimizer(self, trainer: TrainerLike, optimized: set[nn.Parameter]) -> None:
        """Warn of parameters that are not trained."""
        warn_of_untrained_parameters(trainer, optimized)

    def check_schedule(self, trainer: TrainerLike, run: Run, initial: Options | None) -> None:
        """Name rates that have no effect or are left over."""
        check_rates(trainer, run, initial)

    def check_first_batch(self, trainer: TrainerLike, batch: Batch, output: BatchOutput) -> None:
        """Warn of a loss that is a sum, or ignores the target."""
        warn_of_loss(trainer, batch, output)


RUN_CHECKS.append(MistakeChecks())
