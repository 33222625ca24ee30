"""Ending a run early: on a non-finite loss, on a metric that stops improving, or at a time limit."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping
from datetime import timedelta
from typing import Any, NoReturn

import torch

from pytorch_accel_lite.base.devices import AsyncCopy, is_asynchronous, to_float
from pytorch_accel_lite.base.events import NonFiniteLossError, RunPausedError, StopTrainingError, TrainerCallback
from pytorch_accel_lite.base.other_libraries import suggest_arguments
from pytorch_accel_lite.base.protocols import TrainerLike
from pytorch_accel_lite.base.text import wrapped
from pytorch_accel_lite.base.validation import check_choice, check_positive_int, check_positive_number
from pytorch_accel_lite.callbacks.metric_watcher import MetricWatcher
from pytorch_accel_lite.engine.run import Run

_StepLosses = tuple[int, dict[str, torch.Tensor]]  # the number of a step and its losses


class TerminateOnNaNCallback(TrainerCallback):
    """End the run with :class:`NonFiniteLossError` if a loss is infinite or NaN, on all ranks together.

    Numbers that steps log beside the loss may be either. No step waits for the device: losses on a GPU are checked a
    few steps after they were computed, and always by the end of the epoch.

    :ivar triggered: whether a non-finite loss has been seen
    """

    #: Steps between checks of losses on a GPU.
    LOOK_EVERY = 8

    def __init__(self) -> None:
        self.triggered = False
        self._clear()

    def _clear(self) -> None:
        self._recent: deque[_StepLosses] = deque(maxlen=2 * self.LOOK_EVERY)
        self._copied: list[_StepLosses] = []
        self._copy: AsyncCopy | None = None  # of the sum of the losses of self._copied

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self.triggered = False
        self._clear()

    def on_train_step_end(self, trainer: TrainerLike, batch: Any, batch_output: dict[str, Any], **kwargs: Any) -> None:
        latest = trainer.current_run.loss_trackers["loss"].loss_value
        if isinstance(latest, float) and math.isfinite(latest):
            return  # the loss is in host memory and has already been read
        losses = {"loss": batch_output["loss"], **batch_output.get("losses", {})}
        step = trainer.progress.step - 1
        self._recent.append((step, {name: loss.detach() for name, loss in losses.items()}))
        if isinstance(latest, float):
            self._search(trainer, self._recent)
        elif step % self.LOOK_EVERY == 0 and is_asynchronous(losses["loss"].device):  # others wait for the epoch's end
            self._look_late(trainer)

    def _look_late(self, trainer: TrainerLike) -> None:
        """Read the copy started some steps ago, if it has arrived, and start another."""
        if self._copy is not None:
            if not self._copy.has_arrived:
                return
            if not math.isfinite(to_float(self._copy.read())):
                self._search(trainer, self._copied)
        # Sums the latest steps: a single non-finite loss makes the sum non-finite.
        self._copied = list(self._recent)
        self._copy = AsyncCopy(torch.stack([losses["loss"] for _, losses in self._copied]).float().sum())

    def on_train_epoch_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._search(trainer, [*self._copied, *self._recent])
        self._clear()
        self._check_recorded(trainer, "training", "train_{}_epoch")

    def on_eval_epoch_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        if "evaluation_loss" not in trainer.current_run.recorded_losses:  # evaluate() returns what it finds
            self._check_recorded(trainer, "evaluation", "eval_{}_epoch", "intermediate_eval_{}")

    def _check_recorded(self, trainer: TrainerLike, phase: str, *formats: str) -> None:
        """Check the mean of the loss, and those of its parts: what else steps have logged may well be NaN."""
        recorded = trainer.current_run.recorded_losses
        names = ["loss", *sorted(trainer.current_run.loss_trackers.parts)]
        metrics = [form.format(name) for form in formats for name in names]
        losses = {metric: recorded[metric] for metric in metrics if metric in recorded}
        if not all(map(math.isfinite, losses.values())):
            progress = trainer.progress
            where = f"The {phase} loss of epoch {progress.epoch} is not finite after step {progress.step}"
            self._terminate(where, losses)

    def _search(self, trainer: TrainerLike, steps: Collection[_StepLosses]) -> None:
        if not steps:
            return
        finite = torch.stack([losses["loss"] for _, losses in steps]).isfinite().tolist()
        for is_finite, (step, losses) in zip(finite, steps, strict=True):
            if not is_finite:
                where = f"The training loss is not finite in epoch {trainer.progress.epoch}, step {step}"
                self._terminate(where, losses)

    def _terminate(self, where: str, losses: Mapping[str, Any]) -> NoReturn:
        self.triggered = True
        listed = ", ".join(f"{name}={float(value)}" for name, value in losses.items())
        raise NonFiniteLossError(
            f"{where}: {listed}. Lower the learning rate, clip the gradients, or inspect the data of this step."
        )


@suggest_arguments
class EarlyStoppingCallback(MetricWatcher):
    """Stop the run when a metric has stopped improving.

    The defaults are those of pytorch-accelerated: the run stops at the first epoch whose loss is not lower than the
    best by more than 0.01. For a loss that is itself as small as that, pass ``early_stopping_threshold=0``.

    :param early_stopping_patience: number of epochs (or evaluations) without improvement after which the run stops;
        those without a value of the metric do not count
    :param early_stopping_threshold: minimum change to count as an improvement; it must be exceeded
    :param watch_metric: name of the metric in the run history
    :param greater_is_better: whether larger values are better; ``None`` asks the metric, see
        :class:`~pytorch_accel_lite.callbacks.MetricsCallback`. If the metric does not say, smaller values are better,
        with a warning unless it is a loss. A value that contradicts the metric raises an error.
    :param reset_on_train: reset the best value and the patience at the start of every training run
    :param threshold_mode: ``"absolute"``, or ``"relative"`` for a threshold that is a fraction of the best value
    :param patience_in: ``"epochs"``, or ``"evaluations"`` to count every new value of the metric, including values
        within an epoch such as ``intermediate_eval_loss`` of a
        :class:`~pytorch_accel_lite.callbacks.StepBasedEvaluationCallback`
    """

    def __init__(
        self,
        early_stopping_patience: int = 1,
        early_stopping_threshold: float = 0.01,
        watch_metric: str = "eval_loss_epoch",
        greater_is_better: bool | None = None,
        reset_on_train: bool = True,
        *,
        threshold_mode: str = "absolute",
        patience_in: str = "epochs",
    ) -> None:
        super().__init__(watch_metric, greater_is_better, reset_on_train)
        if not early_stopping_threshold >= 0:
            raise ValueError(f"early_stopping_threshold={early_stopping_threshold!r} must be 0 or more.")
        self.early_stopping_patience = check_positive_int("early_stopping_patience", early_stopping_patience)
        self.early_stopping_threshold = early_stopping_threshold
        self.threshold_mode = check_choice("threshold_mode", threshold_mode, ("absolute", "relative"))
        self.patience_in = check_choice("patience_in", patience_in, ("epochs", "evaluations"))
        self._handles_values_within_epochs = patience_in == "evaluations"
        self._run: Run | None = None
        self._message = ""  # printed after the metrics of the epoch
        self._stops_at_once = False  # whether the state from which the run resumed was saved when it was about to stop
        self._reset()

    def _reset(self) -> None:
        """Forget the best value and the patience used."""
        self.best_metric = None
        self.early_stopping_patience_counter = 0

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._run = trainer.current_run
        self._stops_at_once = False
        super().on_training_run_start(trainer)

    def on_train_step_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        super().on_train_step_start(trainer)
        if self._stops_at_once:
            self._stops_at_once = False
            self._stop_if_patience_is_used_up()

    def on_train_step_checkpoint(self, trainer: TrainerLike, **kwargs: Any) -> None:
        super().on_train_step_checkpoint(trainer)
        self._print_message(trainer)

    def on_epoch_checkpoint(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._print_message(trainer)

    def on_stop_training_error(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._print_message(trainer)

    def _handle_value(self, trainer: TrainerLike, metric: float) -> None:
        """Count a value that is no improvement, and stop the run when patience is used up."""
        best = self.best_metric
        threshold = self.early_stopping_threshold
        if best is None:
            improvement = math.inf if math.isfinite(metric) else -math.inf
        else:
            improvement = metric - best if self._watched.greater_is_better else best - metric
            if self.threshold_mode == "relative":
                threshold *= abs(best)
        if improvement > threshold:
            self.best_metric = metric
            self.early_stopping_patience_counter = 0
            return
        self.early_stopping_patience_counter += 1
        used = f"{self.early_stopping_patience_counter} of {self.early_stopping_patience} {self.patience_in}"
        self._message = (
            f"{self.watch_metric}: {metric:.6g} has not improved by more than {threshold:.6g} "
            f"({self._describe_best()}); {used} of patience used."
        )
        self._stop_if_patience_is_used_up()

    def _describe_best(self) -> str:
        best = self.best_metric
        return f"best {'none' if best is None else format(best, '.6g')}, {self._watched.direction}"

    def _stop_if_patience_is_used_up(self) -> None:
        patience = self.early_stopping_patience
        if self.early_stopping_patience_counter >= patience:
            units = self.patience_in if patience > 1 else self.patience_in[:-1]
            of_best = " of the best value" if self.threshold_mode == "relative" else ""
            raise StopTrainingError(
                f"Stopping: {self.watch_metric} has not improved by more than {self.early_stopping_threshold:.6g}"
                f"{of_best} (early_stopping_threshold) for {patience} {units} (early_stopping_patience); "
                f"{self._describe_best()}."
            )

    def _print_message(self, trainer: TrainerLike) -> None:
        if self._message:
            trainer.print(wrapped(self._message))
        self._message = ""

    def state_dict(self) -> dict[str, Any]:
        """Return the best value, the patience used so far, and whether the run has been stopped for good."""
        end = None if self._run is None else self._run.end
        stopped = end is not None and end.reason is not None and end.pause is None
        return {**super().state_dict(), "patience_counter": self.early_stopping_patience_counter, "stopped": stopped}

    def _load_progress(self, state: dict[str, Any]) -> None:
        """Load the patience used so far; a run that was stopped for good is to be trained further, with all of it."""
        self.early_stopping_patience_counter = state["patience_counter"]
        if not state.get("stopped"):
            self._stops_at_once = True
        elif self.early_stopping_patience_counter >= self.early_stopping_patience:
            self.early_stopping_patience_counter = 0


class TimeLimitCallback(TrainerCallback):
    """End the run cleanly, after an update, when a time limit is reached. A resumed run gets the full time again.

    If the job itself has a limit, leave time for saving and for an epoch's evaluation, which is not interrupted. A
    :class:`~pytorch_accel_lite.callbacks.SaveTrainingStateCallback` saves the final state.

    :param limit: time from the start of the run, in seconds or as a ``datetime.timedelta``
    """

    def __init__(self, limit: float | timedelta) -> None:
        seconds = limit.total_seconds() if isinstance(limit, timedelta) else limit
        self.seconds = check_positive_number("limit", seconds)

    def on_train_step_checkpoint(self, trainer: TrainerLike, **kwargs: Any) -> None:
        if trainer.current_run.clock >= self.seconds:
            raise RunPausedError(f"Stopping: the time limit of {timedelta(seconds=self.seconds)} is reached.")

    def on_epoch_checkpoint(self, trainer: TrainerLike, **kwargs: Any) -> None:
        if not trainer.current_run.is_finished:
            self.on_train_step_checkpoint(trainer)
