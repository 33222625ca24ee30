"""Printing the progress of a run in lines: start and end of the run, epochs, metrics."""

from __future__ import annotations

from functools import cached_property

import torch

from pytorch_accel_lite.base.text import escape_unprintable, format_metric
from pytorch_accel_lite.optimizers.operations import parts_of_optimizer
from pytorch_accel_lite.run.callback_handler import set_listening
from pytorch_accel_lite.run.events import TrainerCallback
from pytorch_accel_lite.run.history import MetricValue, NewMetrics
from pytorch_accel_lite.run.run import TrainerLike


class PrintProgressCallback(TrainerCallback):
    """Print a message when a run and each epoch start, and when the run ends, unless it failed or was paused."""

    affects_training = False

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        trainer.print("Starting training run")

    def on_train_epoch_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        trainer.print(f"Starting epoch {epoch_of(trainer)}")

    def on_training_run_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        if trainer.run.end.is_regular:
            trainer.print("Finishing training run")

    def on_evaluation_run_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        trainer.print("Starting evaluation run")

    def on_evaluation_run_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        trainer.print("Finishing evaluation run")


class LogMetricsCallback(TrainerCallback):
    """Print newly recorded metrics, once per machine.

    Metrics are printed after the training part of an epoch, and after every callback has handled the end of the epoch
    or the evaluation. If an epoch ends with an error or a pause, its metrics are not printed. Override
    ``log_metrics()`` to send metrics elsewhere.
    """

    affects_training = False

    @cached_property
    def _new(self) -> NewMetrics:
        return NewMetrics()  # not in a constructor, which subclasses need not call

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        self._new.skip(trainer.run_history)

    on_evaluation_run_start = on_training_run_start

    def on_train_epoch_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        self._new.follow(trainer.run_history)  # a subclass may have overridden the start event
        set_listening(trainer, self, False, "on_train_step_checkpoint")

    def on_eval_epoch_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        # An evaluation within an epoch is logged after its update.
        set_listening(trainer, self, True, "on_train_step_checkpoint")

    def on_training_run_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        if trainer.run.end.is_regular:
            self._log_new(trainer)

    def _log_new(self, trainer: TrainerLike, **kwargs: object) -> None:
        set_listening(trainer, self, False, "on_train_step_checkpoint")
        metrics = self._new_metrics(trainer)
        if metrics:
            self.log_metrics(trainer, metrics)

    on_train_epoch_end = on_train_step_checkpoint = on_epoch_checkpoint = _log_new
    on_stop_training_error = on_exception = on_evaluation_run_end = _log_new

    def _new_metrics(self, trainer: TrainerLike) -> dict[str, MetricValue]:
        return self._new.take(trainer.run_history)

    def log_metrics(self, trainer: TrainerLike, metrics: dict[str, MetricValue]) -> None:
        """Print metrics on one line.

        Args:
            metrics: new values by name
        """
        trainer.print(
            "  " + ", ".join(f"{escape_unprintable(name)}: {format_metric(value)}" for name, value in metrics.items())
        )


def epoch_of(trainer: TrainerLike) -> str:
    """Return the number of the current epoch and, if known, the number of epochs, such as ``3/10``."""
    config = trainer.run_config
    epoch = trainer.progress.epoch
    planned = None if config is None else config.num_epochs
    return f"{epoch}" if planned is None or epoch > planned else f"{epoch}/{planned}"


def shown_rates(trainer: TrainerLike) -> dict[str, float]:
    """Return the rate of the first parameter group: ``lr``, or ``lr_<name>`` for each of several optimizers."""
    return {name: float(rate) for name, rate in rates_of(trainer).items()}


def rates_of(trainer: TrainerLike) -> dict[str, float | torch.Tensor]:
    """Return the rates as numbers, or as copies of tensors, without reading tensors from the device."""
    parts = {f"lr_{name}": part for name, part in parts_of_optimizer(trainer.optimizer).items()} or {
        "lr": trainer.optimizer
    }
    first = {name: group for name, part in parts.items() for group in part.param_groups[:1]}
    rates = {name: group["lr"] for name, group in first.items() if group.get("lr") is not None}
    return {name: rate.clone() if isinstance(rate, torch.Tensor) else rate for name, rate in rates.items()}


def changes_in_each_update(trainer: TrainerLike) -> bool:
    """Return whether a schedule sets the next rate in each update, so that the rate in use must be noted before it."""
    return trainer.scheduler is not None and trainer.run.request.scheduler_interval == "update"
