"""Ending a run early: when a metric stops improving, or at a time limit."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any, Literal

from pytorch_accel_lite.base.arguments import (
    check_choice,
    check_number,
    check_positive_int,
    check_positive_number,
    checked_calls,
)
from pytorch_accel_lite.base.display import wrapped
from pytorch_accel_lite.base.types import StateDict
from pytorch_accel_lite.callbacks.metric_watcher import MetricWatcher
from pytorch_accel_lite.run.ending import RunPausedError, StopTrainingError
from pytorch_accel_lite.run.events import TrainerCallback
from pytorch_accel_lite.run.run import Run, TrainerLike

_CLEAR_CHANGE = 0.01  # relative; a small loss that changes this much clearly changes


def _number(name: str, value: Any) -> float:
    """Return a number, which may be in a tensor or an array, as a float."""
    return float(check_number(name, value.item() if hasattr(value, "item") else value))


@checked_calls("__init__")
class EarlyStoppingCallback(MetricWatcher):
    """Stop the run when a metric has stopped improving.

    With the defaults, which are those of pytorch-accelerated, the run stops at the first epoch in which the loss falls
    by no more than 0.01. For a loss that is itself that small, pass ``early_stopping_threshold=0``, or
    ``threshold_mode="relative"``. The reason for the stop says by how much the metric has improved.

    Args:
        early_stopping_patience: number of epochs (or evaluations) without improvement after which the run stops; epochs
            without a value of the metric do not count
        early_stopping_threshold: minimum change to count as an improvement; it must be exceeded
        watch_metric: name of the metric in the run history
        greater_is_better: whether larger values are better; ``None`` uses what the metric declares, see
            ``MetricsCallback``. If it declares nothing, smaller values are better, with a warning unless it is a loss.
            A value that contradicts the metric raises an error.
        reset_on_train: reset the best value and the patience at the start of every training run
        threshold_mode: ``"absolute"``, or ``"relative"`` for a threshold that is a fraction of the best value, as in
            ``torch.optim.lr_scheduler.ReduceLROnPlateau``: 0.01 asks for a change of 1 %
        patience_in: ``"epochs"``, or ``"evaluations"`` to count every new value of the metric, including those within
            an epoch, see ``evaluate_every`` of ``Trainer.train()``. An epoch counts as an improvement if any of its
            values is one.
        baseline: a value that the first value must improve on, such as that of an earlier model; ``None`` for no
            baseline

    Attributes:
        best_metric: the best value so far, even if it was better by less than the threshold
    """

    def __init__(
        self,
        early_stopping_patience: int = 1,
        early_stopping_threshold: float = 0.01,
        watch_metric: str = "eval_loss_epoch",
        greater_is_better: bool | None = None,
        reset_on_train: bool = True,
        *,
        patience_in: Literal["epochs", "evaluations"] = "epochs",
        threshold_mode: Literal["absolute", "relative"] = "absolute",
        baseline: float | None = None,
    ) -> None:
        super().__init__(watch_metric, greater_is_better, reset_on_train)
        self.early_stopping_threshold = _number("early_stopping_threshold", early_stopping_threshold)
        if not 0 <= self.early_stopping_threshold < math.inf:
            raise ValueError(f"early_stopping_threshold={early_stopping_threshold!r} must be 0 or more, and finite.")
        self.baseline = None if baseline is None else _number("baseline", baseline)
        if self.baseline is not None and math.isnan(self.baseline):
            raise ValueError(f"baseline={baseline!r} must be a number: nothing is better than NaN. Omit it for none.")
        self.early_stopping_patience = check_positive_int("early_stopping_patience", early_stopping_patience)
        self.threshold_mode = check_choice("threshold_mode", threshold_mode, ("absolute", "relative"))
        self.patience_in = check_choice("patience_in", patience_in, ("epochs", "evaluations"))
        self._run: Run | None = None
        self._message = ""  # a message to print after the metrics of the epoch
        self._stops_at_once = False  # whether the resumed state was saved just before a stop
        self._reset()

    def _reset(self) -> None:
        """Forget the best value and the patience used."""
        self.best_metric = None
        self._reference = self.baseline  # the value to improve on: the best when patience was last renewed
        self.early_stopping_patience_counter = 0
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        self._has_improved = False  # whether a value of the epoch was an improvement
        self._without_improvement: float | None = None  # the latest value of the epoch that was no improvement

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        self._run = trainer.run
        self._stops_at_once = False
        super().on_training_run_start(trainer)

    def on_train_step_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        super().on_train_step_start(trainer)
        if self._stops_at_once:
            self._stops_at_once = False
            self._check_patience()

    def on_train_step_checkpoint(self, trainer: TrainerLike, **kwargs: object) -> None:
        super().on_train_step_checkpoint(trainer)
        self._print_message(trainer)

    def _handle_value(self, trainer: TrainerLike, metric: float) -> None:
        """Note whether a value is an improvement, and stop the run when patience is used up."""
        if self._watched.improvement(metric, self.best_metric) > 0:
            self.best_metric = metric
        if self._watched.improvement(metric, self._reference) > self._threshold_on(self._reference):
            self._reference = metric
            self.early_stopping_patience_counter = 0
            self._has_improved = True
            return
        self._without_improvement = metric
        if self.patience_in == "evaluations":
            self._count_patience(metric)

    def _threshold_on(self, reference: float | None) -> float:
        """Return the change that an improvement on a value must exceed. Finite values improve on an infinite one."""
        if self.threshold_mode == "absolute" or reference is None or not math.isfinite(reference):
            return self.early_stopping_threshold
        return self.early_stopping_threshold * abs(reference)

    def on_training_run_epoch_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        super().on_training_run_epoch_end(trainer)
        metric = None if self._has_improved or self.patience_in == "evaluations" else self._without_improvement
        self._begin_epoch()
        if metric is not None:
            self._count_patience(metric)

    def _count_patience(self, metric: float) -> None:
        """Count a value that is no improvement, and stop the run if patience is used up."""
        self.early_stopping_patience_counter += 1
        self._check_patience()
        used = f"{self.early_stopping_patience_counter} of {self.early_stopping_patience} {self.patience_in}"
        self._message = f"{self.watch_metric}: {metric:.6g} {self._compared(metric)}; {used} of patience used."

    def _check_patience(self) -> None:
        """Stop the run if patience is used up."""
        if self.early_stopping_patience_counter >= self.early_stopping_patience:
            raise StopTrainingError(f"{self.watch_metric} {self._reason_to_stop()}")

    def _compared(self, metric: float) -> str:
        """Describe how a value compares with the value that it should have improved on."""
        reference = self._reference
        if reference is None:
            return "is not finite"
        compared = f"{'the baseline ' if self._is_baseline() else ''}{reference:.6g}"
        if (gain := self._watched.improvement(metric, reference)) > 0:
            return f"is better than {compared} by {self._small_gain(gain, reference)}"
        return f"is no better than {compared} ({self._watched.direction})"

    def _reason_to_stop(self) -> str:
        """Describe how the best value compares."""
        patience, best, reference = self.early_stopping_patience, self.best_metric, self._reference
        during = f"{patience} {self.patience_in if patience > 1 else self.patience_in[:-1]} (early_stopping_patience)"
        summary = f"Best {'none' if best is None else f'{best:.6g}'}, {self._watched.direction}."
        if best is not None and reference is not None and (gain := self._watched.improvement(best, reference)) > 0:
            improved = f"has improved by {self._small_gain(gain, reference)}, in {during}. {summary}"
            # The metric may clearly improve, but be too small for the threshold.
            is_clear = self.threshold_mode == "absolute" and gain > _CLEAR_CHANGE * abs(reference)
            advice = ' To train on while it improves, pass early_stopping_threshold=0, or threshold_mode="relative".'
            return improved + advice if is_clear else improved
        on = f" on the baseline {reference:.6g}" if reference is not None and self._is_baseline() else ""
        return f"has not improved{on} for {during}. {summary}"

    def _is_baseline(self) -> bool:
        """Whether the value to improve on is still the baseline."""
        return self._reference == self.baseline and self._reference != self.best_metric

    def _small_gain(self, gain: float, reference: float) -> str:
        """Describe an improvement that is too small, and the threshold."""
        threshold = self.early_stopping_threshold
        change = f"{100 * gain / abs(reference or 1):.2g} %"
        below = "less" if gain < self._threshold_on(reference) else "not more"
        if self.threshold_mode == "relative":
            return f"{change}, {below} than {100 * threshold:.6g} % (early_stopping_threshold)"
        share = f" ({change})" if reference else ""
        return f"{gain:.3g}{share}, {below} than {threshold:.6g} (early_stopping_threshold)"

    def _print_message(self, trainer: TrainerLike, **kwargs: object) -> None:
        if self._message:
            trainer.print(wrapped(self._message))
        self._message = ""

    on_epoch_checkpoint = on_stop_training_error = _print_message

    def state_dict(self) -> StateDict:
        """Return the best value, the patience used so far, and whether the run has been stopped for good."""
        end = None if self._run is None else self._run.end
        stopped = end is not None and end.reason is not None and end.pause is None
        return {
            **super().state_dict(),
            "patience_counter": self.early_stopping_patience_counter,
            "stopped": stopped,
            "of_epoch": [self._has_improved, self._without_improvement],
            "reference": self._reference,
        }

    def _load_progress(self, state: StateDict) -> None:
        """Load the patience used so far. A run that was stopped for good is trained further with full patience."""
        self.early_stopping_patience_counter = state["patience_counter"]
        self._has_improved, self._without_improvement = state.get("of_epoch", (False, None))
        best = self.baseline if self.best_metric is None else self.best_metric
        self._reference = state.get("reference", best)  # older states have only the best value
        if not state.get("stopped"):
            self._stops_at_once = True
        elif self.early_stopping_patience_counter >= self.early_stopping_patience:
            self.early_stopping_patience_counter = 0


class TimeLimitCallback(TrainerCallback):
    """End the run cleanly, after an update, when a time limit is reached. A resumed run gets the full time again.

    After its last update, a run is not stopped: it evaluates and ends as usual. If the job itself has a limit, leave
    time for saving and for an epoch's evaluation, which is not interrupted. A ``SaveTrainingStateCallback`` saves the
    final state.

    Args:
        limit: time from the start of the run, in seconds or as a ``datetime.timedelta``

    Attributes:
        seconds: the time limit in seconds
    """

    def __init__(self, limit: float | timedelta) -> None:
        seconds = limit.total_seconds() if isinstance(limit, timedelta) else limit
        self.seconds = check_positive_number("limit", seconds)

    def on_train_step_checkpoint(self, trainer: TrainerLike, **kwargs: object) -> None:
        run = trainer.run
        if run.clock >= self.seconds and not run.has_made_last_update:
            raise RunPausedError(f"Stopping: the time limit of {timedelta(seconds=self.seconds)} is reached.")

    def on_epoch_checkpoint(self, trainer: TrainerLike, **kwargs: object) -> None:
        self.on_train_step_checkpoint(trainer)
