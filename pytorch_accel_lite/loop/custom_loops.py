"""Support for an overridden ``_run_training`` or ``_run_train_epoch``, as in pytorch-accelerated.

A custom loop in ``_run_training`` calls ``_run_train_epoch`` and ``_run_eval_epoch``, fires the events of the run, and
counts the epochs of the history. The functions here do the rest. An override that calls ``super()._run_training()``
runs the package's own loop.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from pytorch_accel_lite.base.warnings_and_errors import warn_outside
from pytorch_accel_lite.data.sources import Source
from pytorch_accel_lite.loop import training
from pytorch_accel_lite.loop.guards.epoch_checks import warn_of_nonfinite_weights
from pytorch_accel_lite.loop.lifecycle import end_failed_run
from pytorch_accel_lite.loop.loaders_and_lengths import sharded_for_run
from pytorch_accel_lite.run.ending import StopTrainingError
from pytorch_accel_lite.run.run import Run, TrainerLike


def run_custom_loop(trainer: TrainerLike, run: Run) -> None:
    """Call an overridden ``_run_training``; if it has a loop of its own, end the run afterwards."""
    try:
        with _watching_custom_loop(trainer, run):
            trainer._run_training()
    except BaseException as error:
        if not run.loop.uses_builtin_loop:
            end_failed_run(trainer, run, error, ended=run.end.custom_loop_is_ending)
        raise
    if not run.loop.uses_builtin_loop:
        run.end.make_last_calls()
        warn_of_nonfinite_weights(trainer, run)


def train_epoch_on(trainer: TrainerLike, run: Run, source: Source) -> bool:
    """Run the steps of an epoch on the batches that an override passes; return the result of ``train_epoch()``."""
    if not run.loop.uses_builtin_loop:
        _begin_epoch(trainer, run)
    own = run.data.train_loader
    if source is own:
        return training.train_epoch(trainer, run)
    run.data.train_loader = sharded_for_run(trainer, run, source, training=True)
    try:
        return training.train_epoch(trainer, run)
    finally:
        if run.data.train_loader is not source:
            run.data.train_loader.stop_workers()
        run.data.train_loader = own


def _begin_epoch(trainer: TrainerLike, run: Run) -> None:
    """Complete the previous epoch of a custom loop, and begin the next."""
    _refuse_to_resume(trainer, run)
    if not run.progress.epoch and run.request.saves_training_states and run.ranks.rank == 0:
        warn_outside(
            f"{type(trainer).__name__}._run_training has a loop of its own, so the run cannot be resumed from the "
            "states that it saves. For that, let it call super()._run_training()."
        )
    _complete_epoch(trainer, run)
    training.begin_epoch(trainer, run)


def _refuse_to_resume(trainer: TrainerLike, run: Run) -> None:
    """Raise an error if a custom loop would begin a run again that is to be resumed."""
    if run.resumed is not None:
        raise RuntimeError(
            f"{type(trainer).__name__}._run_training has a loop of its own, which begins with the first epoch, so the "
            "run cannot be resumed. Call super()._run_training() instead, and put what it adds into "
            "training_run_start, training_run_epoch_end and training_run_end."
        )


def _complete_epoch(trainer: TrainerLike, run: Run) -> None:
    """Complete an epoch of a custom loop. The loop itself only counts the epoch in the history."""
    if run.epoch_is_trained:
        trainer._step_after_epoch()
        training.complete_epoch(trainer, run)


@contextmanager
def _watching_custom_loop(trainer: TrainerLike, run: Run) -> Iterator[None]:
    """Within a block, check a custom loop when it starts, and note how it ends, before the callbacks are told."""

    def note_start(trainer: TrainerLike, **kwargs: object) -> None:
        if not run.loop.uses_builtin_loop:
            _refuse_to_resume(trainer, run)

    def note_end(trainer: TrainerLike, **kwargs: object) -> None:
        if not run.loop.uses_builtin_loop:
            run.end.custom_loop_is_ending = True
            with suppress(StopTrainingError):
                if run.end.reason is None:  # a run that was stopped ends within its epoch
                    _complete_epoch(trainer, run)

    def note_stop(trainer: TrainerLike, **kwargs: object) -> None:
        stop = sys.exc_info()[1]  # the event is fired while the stop is being handled
        if not run.loop.uses_builtin_loop and isinstance(stop, StopTrainingError):
            run.end.note(stop)

    handler = trainer.callback_handler
    handler.called_first = {
        "on_training_run_start": note_start,
        "on_training_run_end": note_end,
        "on_stop_training_error": note_stop,
    }
    handler.listeners.clear()
    try:
        yield
    finally:
        handler.called_first = {}
        handler.listeners.clear()
