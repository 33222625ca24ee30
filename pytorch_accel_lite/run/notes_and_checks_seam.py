"""Seams of runs: notes on their errors, and checks for mistakes of a program that is not wrong as such."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from torch import nn

from pytorch_accel_lite.data.batches import Batch
from pytorch_accel_lite.data.sources import BatchOutput
from pytorch_accel_lite.optimizers.scheduled_options import Options
from pytorch_accel_lite.run.events import Phase
from pytorch_accel_lite.run.run import Run, TrainerLike

#: Functions that may add notes to an error of a run: where it happened, for example, or what to do. An extension adds
#: its own. They are called with the error once for each part of the run that it leaves, from the innermost.
ERROR_NOTES: list[Callable[[Exception, TrainerLike, Run, Phase], None]] = []

#: Functions that advise on a training step that did not fit into memory, for such a note: each returns a sentence
#: without its first capital letter, or nothing.
MEMORY_ADVICE: list[Callable[[TrainerLike], str]] = []


@contextmanager
def adding_error_notes(trainer: TrainerLike, run: Run, phase: Phase) -> Iterator[None]:
    """Let extensions add notes to an error that is raised within a block."""
    try:
        yield
    except Exception as error:
        add_error_notes(error, trainer, run, phase)
        raise


def add_error_notes(error: BaseException, trainer: TrainerLike, run: Run, phase: Phase) -> None:
    """Let extensions add notes to an error of a run."""
    if not isinstance(error, Exception):
        return
    for add_notes in ERROR_NOTES:
        with suppress(Exception):  # a failing note must not hide the error
            add_notes(error, trainer, run, phase)


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
