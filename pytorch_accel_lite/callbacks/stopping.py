"""Ending a run early: on a non-finite loss, on a metric that stops improving, or at a time limit."""

from __future__ import annotations

import math
import operator
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from pytorch_accel_lite.base.devices import AsyncCopy, is_asynchronous, to_float
from pytorch_accel_lite.base.events import NonFiniteLossError, RunPausedError, StopTrainingError, TrainerCallback
from pytorch_accel_lite.base.inspection import is_overridden
from pytorch_accel_lite.base.other_libraries import suggest_arguments
from pytorch_accel_lite.base.protocols import TrainerLike
from pytorch_accel_lite.base.text import wrapped
from pytorch_accel_lite.base.validation import check_choice, check_positive_int, check_positive_number
from pytorch_accel_lite.base.watched_metric import WatchedMetric
from pytorch_accel_lite.engine.run import Run

if TYPE_CHECKING:
    from pytorch_accel_lite.base.run_settings import RunRequest


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
        self._recent: deque[tuple[int, torch.Tensor, dict[str, torch.Tensor]]] = deque(maxlen=2 * self.LOOK_EVERY)
        self._copy: AsyncCopy | None = None  # of the sum of self._copied
        self._copied: list[tuple[int, torch.Tensor, dict[str, torch.Tensor]]] = []

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self.triggered = False
        self._clear()

    def on_train_step_end(self, trainer: TrainerLike, batch: Any, batch_output: dict[str, Any], **kwargs: Any) -> None:
        latest = trainer.current_run.loss_trackers["loss"].loss_value
        if isinstance(latest, float) and math.isfinite(latest):
            return  # the loss is in host memory and has already been read
        loss = batch_output["loss"].detach()
        named = {name: value.detach() for name, value in batch_output.get("losses", {}).items()}
        step = trainer.progress.step - 1
        if isinstance(latest, float):
            self._terminate(trainer, step, loss, named)
        self._recent.append((step, loss, named))
        if step % self.LOOK_EVERY == 0:
            self._look_late(trainer, loss)

    def _look_late(self, trainer: TrainerLike, loss: torch.Tensor) -> None:
        """Read the copy started some steps ago, if it has arrived, and start another."""
        if not is_asynchronous(loss.device):
            return  # checked at the end of the epoch
        if self._copy is not None:
            if not self._copy.has_arrived:
                return
            if not math.isfinite(to_float(self._copy.read())):
                self._search(trainer, self._copied)
        # Sums the latest steps: a single non-finite loss makes the sum non-finite.
        self._copied = list(self._recent)
        self._copy = AsyncCopy(torch.stack([recent for _, recent, _ in self._copied]).float().sum())

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
            self.triggered = True
            listed = ", ".join(f"{metric}={loss}" for metric, loss in losses.items())
            raise NonFiniteLossError(
                f"The {phase} loss of epoch {trainer.progress.epoch} is not finite after step "
                f"{trainer.progress.step}: {listed}. {_ADVICE}"
            )

    def _search(self, trainer: TrainerLike, steps: list[tuple[int, torch.Tensor, dict[str, torch.Tensor]]]) -> None:
        if not steps:
            return
        finite = torch.stack([loss for _, loss, _ in steps]).isfinite().tolist()
        for is_finite, recent in zip(finite, steps, strict=True):
            if not is_finite:
                self._terminate(trainer, *recent)

    def _terminate(
        self, trainer: TrainerLike, step: int, loss: torch.Tensor, named: dict[str, torch.Tensor]
    ) -> NoReturn:
        self.triggered = True
        losses = {"loss": loss, **named}
        listed = ", ".join(f"{name}={float(value)}" for name, value in losses.items())
        raise NonFiniteLossError(
            f"The training loss is not finite in epoch {trainer.progress.epoch}, step {step}: {listed}. {_ADVICE}"
        )


_ADVICE = "Lower the learning rate, clip the gradients, or inspect the data of this step."


@suggest_arguments
class EarlyStoppingCallback(TrainerCallback):
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
    :param baseline: value that must be improved upon from the start; ``None`` accepts any first value
    :param patience_in: ``"epochs"``, or ``"evaluations"`` to count every new value of the metric, including values
        within an epoch such as ``intermediate_eval_loss`` of a
        :class:`~pytorch_accel_lite.callbacks.StepBasedEvaluationCallback`
    """

    _message = ""  # printed after the metrics of the epoch
    _stop = ""  # why the run is to stop, until it does
    _trainer: TrainerLike | None = None

    def __init__(
        self,
        early_stopping_patience: int = 1,
        early_stopping_threshold: float = 0.01,
        watch_metric: str = "eval_loss_epoch",
        greater_is_better: bool | None = None,
        reset_on_train: bool = True,
        *,
        threshold_mode: str = "absolute",
        baseline: float | None = None,
        patience_in: str = "epochs",
    ) -> None:
        self.early_stopping_patience = check_positive_int("early_stopping_patience", early_stopping_patience)
        if not early_stopping_threshold >= 0:
            raise ValueError(f"early_stopping_threshold={early_stopping_threshold!r} must be 0 or more.")
        if baseline is not None and not math.isfinite(baseline):
            raise ValueError(f"baseline={baseline!r} must be a finite number, or None.")
        self.early_stopping_threshold = early_stopping_threshold
        self.watch_metric = watch_metric
        self.greater_is_better = greater_is_better
        self.reset_on_train = reset_on_train
        self.threshold_mode = check_choice("threshold_mode", threshold_mode, ("absolute", "relative"))
        self.baseline = baseline
        self.patience_in = check_choice("patience_in", patience_in, ("epochs", "evaluations"))
        self.best_metric = baseline
        self.early_stopping_patience_counter = 0
        self._watched = WatchedMetric(self, "watch_metric", watch_metric, greater_is_better)
        self._evaluated = False

    @property
    def operator(self) -> Callable[[Any, Any], bool]:
        """The function that compares whether one value is better than another."""
        return operator.gt if self._watched.greater_is_better else operator.lt

    def configure_run(self, trainer: TrainerLike, request: RunRequest, **kwargs: Any) -> None:
        if request.kind == "training":
            request.metrics.watch(self._watched)

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._trainer = trainer
        self._stop = ""
        trainer.callback_handler.set_listening(self, True, "on_train_step_start")
        self._watched.start(trainer)
        self._evaluated = False
        if self.reset_on_train:
            self.best_metric = self.baseline
            self.early_stopping_patience_counter = 0

    def on_train_step_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        if not is_overridden(self, "on_train_step_start"):
            trainer.callback_handler.set_listening(self, False, "on_train_step_start")
        self._stop_if_due()  # the resumed state was saved when the run was about to stop

    def on_eval_epoch_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._evaluated = True

    def on_train_step_checkpoint(self, trainer: TrainerLike, **kwargs: Any) -> None:
        if self._evaluated and self.patience_in == "evaluations":
            self._look(trainer, mid_epoch=True)
            self._evaluated = False
            self._stop_if_due()
            self._say(trainer)

    def on_training_run_epoch_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._look(trainer, mid_epoch=False)
        self._evaluated = False
        self._stop_if_due()

    def on_epoch_checkpoint(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._say(trainer)

    def on_stop_training_error(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._say(trainer)

    def _look(self, trainer: TrainerLike, mid_epoch: bool) -> None:
        """Take account of a new value of the metric, if there is one."""
        metric = self._watched.new_value(trainer, mid_epoch)
        if metric is None:
            return
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
        self._message = (
            f"{self.watch_metric}: {metric:.6g} has not improved by more than {threshold:.6g} ({self._stands_at}); "
            f"{self.early_stopping_patience_counter} of {self.early_stopping_patience} {self.patience_in} of patience "
            "used."
        )
        self._use_up_patience()

    @property
    def _stands_at(self) -> str:
        best = self.best_metric
        return f"best {'none' if best is None else format(best, '.6g')}, {self._watched.direction}"

    def _use_up_patience(self) -> None:
        if self.early_stopping_patience_counter >= self.early_stopping_patience:
            patience = self.early_stopping_patience
            units = self.patience_in if patience > 1 else self.patience_in[:-1]
            of_best = " of the best value" if self.threshold_mode == "relative" else ""
            self._stop = (
                f"Stopping: {self.watch_metric} has not improved by more than {self.early_stopping_threshold:.6g}"
                f"{of_best} (early_stopping_threshold) for {patience} {units} (early_stopping_patience); "
                f"{self._stands_at}."
            )

    def _stop_if_due(self) -> None:
        reason, self._stop = self._stop, ""
        if reason:
            raise StopTrainingError(reason)

    def _say(self, trainer: TrainerLike) -> None:
        if self._message:
            trainer.print(wrapped(self._message))
        self._message = ""

    def state_dict(self) -> dict[str, Any]:
        """Return the best value and the patience used so far."""
        trainer = self._trainer
        counts = trainer is not None and trainer.progress.is_mid_epoch and self.patience_in == "evaluations"
        if trainer is not None and counts and self._evaluated:
            self._look(trainer, mid_epoch=True)  # the state may be taken before this callback's turn
        return {
            **self._watched.state_dict(),
            "best_metric": self.best_metric,
            "patience_counter": self.early_stopping_patience_counter,
            "stopped": trainer is not None and _is_stopped(trainer.current_run),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state returned by :meth:`state_dict`, unless it belongs to another metric."""
        if self._watched.load_state_dict(state, self):
            self.best_metric = state["best_metric"]
            self.early_stopping_patience_counter = state["patience_counter"]
            if not state.get("stopped"):
                self._use_up_patience()
            elif self.early_stopping_patience_counter >= self.early_stopping_patience:
                self.early_stopping_patience_counter = 0  # the stopped run is to be trained further


def _is_stopped(run: Run) -> bool:
    return run.end.reason is not None and run.end.pause is None


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
