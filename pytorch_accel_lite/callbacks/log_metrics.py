"""Printing the metrics that are new, on one line."""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property

from pytorch_accel_lite.base.display import escape_unprintable, format_metric
from pytorch_accel_lite.run.callback_handler import set_own_listening
from pytorch_accel_lite.run.events import TrainerCallback
from pytorch_accel_lite.run.history import MetricValue, NewMetrics
from pytorch_accel_lite.run.run import TrainerLike


class LogMetricsCallback(TrainerCallback):
    """Print newly recorded metrics, once per machine.

    Metrics are printed after the training part of an epoch, and after every callback has handled the end of the epoch
    or the evaluation. If an epoch ends with an error or a pause, its metrics are not printed. Override
    ``log_metrics()`` to send metrics elsewhere.
    """

    affects_training = False
    arguments_may_differ = True

    @cached_property
    def _new(self) -> NewMetrics:
        return NewMetrics()  # not in a constructor, which subclasses need not call

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        self._new.skip(trainer.run_history)

    def on_evaluation_run_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        if trainer.run.outer is None:
            self._new.skip(trainer.run_history)
        else:  # before the values of an evaluation in a callback come, those of the run
            self._log_new(trainer)

    def on_evaluation_run_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        self._log(trainer, self._new_metrics(trainer, trainer.run.passing_metrics))

    def on_train_epoch_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        self._new.follow(trainer.run_history)  # a subclass may have overridden the start event
        set_own_listening(trainer, self, False, "on_train_step_checkpoint")

    def on_eval_epoch_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        # An evaluation within an epoch is logged after its update.
        set_own_listening(trainer, self, True, "on_train_step_checkpoint")

    def on_training_run_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        if trainer.run.end.is_regular:
            self._log_new(trainer)

    def _log_new(self, trainer: TrainerLike, **kwargs: object) -> None:
        self._log(trainer, self._new_metrics(trainer))

    def _log(self, trainer: TrainerLike, metrics: dict[str, MetricValue]) -> None:
        set_own_listening(trainer, self, False, "on_train_step_checkpoint")
        if metrics:
            self.log_metrics(trainer, metrics)

    on_train_epoch_end = on_train_step_checkpoint = on_epoch_checkpoint = _log_new
    on_stop_training_error = on_exception = _log_new

    def _new_metrics(self, trainer: TrainerLike, passing: Collection[str] = ()) -> dict[str, MetricValue]:
        return self._new.take(trainer.run_history, passing)

    def log_metrics(self, trainer: TrainerLike, metrics: dict[str, MetricValue]) -> None:
        """Print metrics on one line.

        Args:
            metrics: new values by name
        """
        trainer.print(
            "  " + ", ".join(f"{escape_unprintable(name)}: {format_metric(value)}" for name, value in metrics.items())
        )
