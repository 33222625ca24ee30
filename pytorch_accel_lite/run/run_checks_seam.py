"""What extensions look for in a training run: mistakes of a program that is not wrong as such."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import nn

from pytorch_accel_lite.data import Batch
from pytorch_accel_lite.data.sources import BatchOutput
from pytorch_accel_lite.optimizers.scheduled_options import Options
from pytorch_accel_lite.run.run import Run, TrainerLike


@dataclass
class RunChecks:
    """Checks at some points of a training run. Each may warn, print, or raise an error, which ends the run.

    Attributes:
        of_user_code: called on the first process before a run with the trainer and the callbacks whose classes are
            users', if there are any
        of_optimizer: called before a run, or once a factory has created the optimizer, with the trainer and the
            parameters of all optimizers, those in attributes included
        of_schedule: called when the run has its scheduler, or none, with the trainer, the run, and the options of the
            optimizer from before any schedule, if the run begins with them, or has no scheduler and might; ``None``
            instead of the options for a run that is resumed
        before_training: called before the first update, when the starting events have fired, with the trainer and the
            run
        of_first_batch: called on the first process with the trainer, the first training batch that it reads, and its
            output, before the backward pass
    """

    of_user_code: list[Callable[[Iterable[object]], None]] = field(default_factory=list)
    of_optimizer: list[Callable[[TrainerLike, set[nn.Parameter]], None]] = field(default_factory=list)
    of_schedule: list[Callable[[TrainerLike, Run, Options | None], None]] = field(default_factory=list)
    before_training: list[Callable[[TrainerLike, Run], None]] = field(default_factory=list)
    of_first_batch: list[Callable[[TrainerLike, Batch, BatchOutput], None]] = field(default_factory=list)


#: The checks of training runs, in the order in which they are made. Extensions add theirs.
RUN_CHECKS = RunChecks()
