"""When the scheduler of a run is stepped: after updates, after epochs, or after evaluations of its metric."""

from __future__ import annotations

from pytorch_accel_lite.run.run import TrainerLike


def step_after_update(trainer: TrainerLike) -> None:
    """Step a per-update scheduler, after an update that was not skipped."""
    if trainer.scheduler is not None and trainer.current_run.request.scheduler_interval == "update":
        trainer.scheduler_step()


def step_within_epoch(trainer: TrainerLike) -> None:
    """Step a scheduler that follows a metric, after an evaluation within an epoch."""
    if trainer.current_run.request.scheduler_metric is not None and trainer.scheduler is not None:
        trainer.scheduler_step()


def step_after_epoch(trainer: TrainerLike) -> None:
    """Step a per-epoch scheduler. A scheduler that follows a metric is stepped only after an evaluation."""
    run = trainer.current_run
    request = run.request
    each_epoch = trainer.scheduler is not None and request.scheduler_interval == "epoch"
    has_metric = request.scheduler_metric is None or run.evaluation_is_due or not run.data.all_eval_loaders
    if each_epoch and has_metric:
        trainer.scheduler_step()
