"""When a training run evaluates within its epochs. ``evaluation.py`` has the evaluation itself."""

from __future__ import annotations

from pytorch_accel_lite.base.display.user_warnings import warn_outside
from pytorch_accel_lite.loop.evaluation import EvaluationKind, evaluate_in_derived_run
from pytorch_accel_lite.run.ending.stop_errors import StopTrainingError
from pytorch_accel_lite.run.intervals import Interval
from pytorch_accel_lite.run.progress import EpochPhase
from pytorch_accel_lite.run.run import Run, TrainerLike
from pytorch_accel_lite.run.scheduler_stepping import step_within_epoch


def begin_evaluations(run: Run) -> None:
    """Determine when a training run evaluates, from its beginning or from the point at which it resumes."""
    every = run.request.evaluate_every
    if not run.data.all_eval_loaders:
        if every is not None and run.ranks.rank == 0:
            warn_outside(f"evaluate_every={every!r} has no effect: train() was given no eval_dataset.")
        return
    run.evaluation_interval = interval = (
        Interval(run.request.eval_every_n_epochs, "epochs") if every is None else Interval(every)
    )
    interval.start(run, "" if every is None else "evaluate_every")
    if run.resumed is not None and (saved := run.resumed.shared.get("evaluations")) is not None:
        interval.load_state_dict(saved, run)


def evaluate_if_due(trainer: TrainerLike, run: Run, ends_epoch: bool = False) -> None:
    """Evaluate within an epoch, if that is due, and step a scheduler that follows a metric.

    Args:
        ends_epoch: whether the steps of the epoch are over. An evaluation that is then due, except by time, takes place
            after the epoch.
    """
    interval = run.evaluation_interval
    if interval is None or run.is_finished or not interval.is_due(run):
        return
    if ends_epoch and (run.ends_with_epoch or not interval.is_time):
        return
    inner = run.derive()
    stopped: StopTrainingError | None = None
    try:
        evaluate_in_derived_run(trainer, inner, EvaluationKind.OF_RUN)
    except StopTrainingError as stop:  # of a callback, which may come after a complete evaluation
        stopped = stop
    if inner.epoch_phase == EpochPhase.EVALUATED:
        interval.advance(run)
        run.counts_before_evaluation = None
        step_within_epoch(trainer)
    if stopped is not None:
        raise stopped
