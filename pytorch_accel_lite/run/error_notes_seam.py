"""The seam for notes on the errors of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

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
