"""Reporting the progress of a run: messages, a progress bar, metrics."""

from __future__ import annotations

import math
import sys
import time
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from pytorch_accel_lite.base.environment import in_notebook, is_terminal
from pytorch_accel_lite.base.events import TrainerCallback
from pytorch_accel_lite.base.inspection import find_length
from pytorch_accel_lite.base.protocols import TrainerLike
from pytorch_accel_lite.base.text import format_metric
from pytorch_accel_lite.base.validation import check_choice, check_positive_number, check_range
from pytorch_accel_lite.callbacks.bars import NotebookBars, RichBars, TerminalBars
from pytorch_accel_lite.callbacks.new_metrics import NewMetrics
from pytorch_accel_lite.optimizers.operations import parts_of

if TYPE_CHECKING:
    from pytorch_accel_lite.base.run_settings import TrainerRunConfig


class PrintProgressCallback(TrainerCallback):
    """Print a message when a run and each epoch start, and when the run ends, unless it failed or was paused."""

    _failed = False

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._failed = False
        trainer.print("Starting training run")

    def on_exception(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._failed = True

    def on_train_epoch_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        trainer.print(f"Starting epoch {epoch_of(trainer)}")

    def on_training_run_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        if not self._failed and trainer.current_run.end.pause is None:
            trainer.print("Finishing training run")

    def on_evaluation_run_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        trainer.print("Starting evaluation run")

    def on_evaluation_run_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        trainer.print("Finishing evaluation run")


class ProgressBarCallback(TrainerCallback):
    """Show a progress bar for each training epoch and each evaluation, in a terminal or a notebook.

    The bar shows the running mean of the loss, the latest evaluation loss, the learning rate of each optimizer, the
    samples per second over all processes and, if the length of the run is known, the time left. The loss is read from
    the device only when it is shown, a few times per second. A narrow terminal shows as much of this as fits; printed
    text appears above the bar. Only the first process of each machine shows bars, and only if its output is a terminal
    or a notebook; otherwise, as in a cluster job's log, it prints a line at intervals.

    :param show_always: show bars even if the output is a file or a pipe
    :param refresh_seconds: seconds between refreshes of the bar
    :param line_every_seconds: seconds between lines where there are no bars; ``None`` prints no lines
    :param style: ``"tqdm"``, or ``"rich"`` for rich's bars (extra ``rich``); notebooks have their own style
    """

    def __init__(
        self,
        show_always: bool = False,
        refresh_seconds: float = 0.25,
        *,
        line_every_seconds: float | None = 30.0,
        style: str = "tqdm",
    ) -> None:
        check_range("refresh_seconds", refresh_seconds)
        if line_every_seconds is not None:
            check_positive_number("line_every_seconds", line_every_seconds)
        self.show_always = show_always
        self.refresh_seconds = refresh_seconds
        self.line_every_seconds = line_every_seconds
        self._config: TrainerRunConfig | None = None
        self._run_start = self._epoch_start = self._next_refresh = 0.0
        self._updates_before = self._samples_before = 0
        self._interval = refresh_seconds
        self.pbar: Any = None
        self.eval_pbar: Any = None
        use_rich = check_choice("style", style, ("tqdm", "rich")) == "rich"
        self._bars: TerminalBars | RichBars | NotebookBars = TerminalBars()
        if in_notebook():
            self._bars = NotebookBars()
        elif use_rich:
            self._bars = RichBars(show_always)

    def _start(self, trainer: TrainerLike, loader: Any, description: str, before: Any) -> Any:
        if before is not None:  # for example, of an evaluation that failed
            self._bars.finish(before)
        return self._bars.start(
            trainer,
            desc=description,
            total=find_length(loader),
            unit="batches",
            mininterval=self.refresh_seconds,
            disable=not self._shows_bars(trainer),
        )

    def _shows_bars(self, trainer: TrainerLike) -> bool:
        is_watched = self.show_always or in_notebook() or is_terminal(sys.stderr)
        return bool(trainer.accelerator.is_local_main_process and is_watched)

    def _begin_run(self, trainer: TrainerLike) -> None:
        self._config = trainer.run_config
        self._run_start = time.monotonic()
        self._updates_before = trainer.progress.update
        self._interval = self.refresh_seconds
        if not self._shows_bars(trainer):
            seconds = self.line_every_seconds if trainer.accelerator.is_local_main_process else None
            self._interval = math.inf if seconds is None else seconds
        self._next_refresh = self._run_start + self._interval

    def on_train_epoch_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        if trainer.run_config is not self._config:  # a run's first epoch, even if a subclass overrides the start event
            self._begin_run(trainer)
        self.pbar = self._start(trainer, trainer.train_dataloader, f"Epoch {epoch_of(trainer)}", self.pbar)
        self._epoch_start = time.monotonic()
        self._samples_before = trainer.progress.samples_in_epoch
        if not self.pbar.disable:
            self._next_refresh = self._epoch_start
            self.pbar.update(trainer.progress.step)

    def on_train_step_end(self, trainer: TrainerLike, *args: Any, **kwargs: Any) -> None:
        now = time.monotonic()
        if now < self._next_refresh:
            return
        self._next_refresh = now + self._interval
        if self.pbar.disable:
            numbers = ", ".join(f"{name} {value}" for name, value in self._numbers(trainer, now).items())
            of_all = "" if self.pbar.total is None else f"/{self.pbar.total}"
            trainer.print(f"Epoch {epoch_of(trainer)}, step {trainer.progress.step}{of_all}: {numbers}")
        else:
            self._show(trainer, now)

    def _numbers(self, trainer: TrainerLike, now: float) -> dict[str, str]:
        """Return the values to show by name, the most important first."""
        numbers = {"loss": f"{trainer.current_run.loss_trackers['loss'].average:.4g}"}
        config = trainer.run_config
        progress = trainer.progress
        made = progress.update - self._updates_before
        if config is not None and config.max_num_train_steps is not None and made:
            # Includes the evaluations and saving done so far.
            left = (now - self._run_start) / made * (config.max_num_train_steps - progress.update)
            numbers["run left"] = tqdm.format_interval(left)
        seconds = now - self._epoch_start
        if seconds > 0:
            numbers["samples/s"] = f"{(progress.samples_in_epoch - self._samples_before) / seconds:,.0f}"
        evaluated = trainer.run_history.get_metric_values("eval_loss_epoch")
        if evaluated:
            numbers["eval_loss"] = f"{float(evaluated[-1]):.4g}"
        return numbers | {name: f"{rate:.3g}" for name, rate in shown_rates(trainer).items()}

    def _show(self, trainer: TrainerLike, now: float) -> None:
        self.pbar.set_postfix(self._numbers(trainer, now), refresh=False)
        self.pbar.update(trainer.progress.step - self.pbar.n)

    def on_train_epoch_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        if not self.pbar.disable:
            self._show(trainer, time.monotonic())
        self._bars.finish(self.pbar)

    def on_eval_epoch_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self.eval_pbar = self._start(trainer, trainer.eval_dataloader, "Evaluating", self.eval_pbar)

    def on_eval_step_end(self, trainer: TrainerLike, *args: Any, **kwargs: Any) -> None:
        if not self.eval_pbar.n:  # a later callback may have limited the evaluation
            self.eval_pbar.total = find_length(trainer.eval_dataloader)
        self.eval_pbar.update(1)

    def on_eval_epoch_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._bars.finish(self.eval_pbar)

    def on_evaluation_run_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._end(trainer)

    def on_predict_run_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self.eval_pbar = self._start(trainer, trainer.eval_dataloader, "Predicting", self.eval_pbar)

    def on_predict_step_end(self, trainer: TrainerLike, *args: Any, **kwargs: Any) -> None:
        self.eval_pbar.update(1)

    def on_predict_run_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._bars.finish(self.eval_pbar)
        self._end(trainer)

    def _end(self, trainer: TrainerLike) -> None:
        if not trainer.is_running or trainer.train_dataloader is None:  # outside a training run
            self._bars.close()

    def on_training_run_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._bars.close()

    def on_stop_training_error(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._bars.close()

    def on_exception(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._bars.close()


def epoch_of(trainer: TrainerLike) -> str:
    """Return the number of the current epoch and, if known, the number of epochs, such as ``3/10``."""
    config = trainer.run_config
    epoch = trainer.progress.epoch
    planned = None if config is None else config.num_epochs
    return f"{epoch}" if planned is None or epoch > planned else f"{epoch}/{planned}"


def shown_rates(trainer: TrainerLike) -> dict[str, float]:
    """Return the rate of the first parameter group: ``lr``, or ``lr_<name>`` for each of several optimizers."""
    parts = {f"lr_{name}": part for name, part in parts_of(trainer.optimizer).items()} or {"lr": trainer.optimizer}
    first = {name: group for name, part in parts.items() for group in part.param_groups[:1]}
    return {name: float(group["lr"]) for name, group in first.items() if group.get("lr") is not None}


class LogMetricsCallback(TrainerCallback):
    """Print newly recorded metrics, once per machine.

    Metrics are printed after the training part of an epoch, and after every callback has seen the end of the epoch or
    the evaluation. Override :meth:`log_metrics` to send them elsewhere.
    """

    def __init__(self) -> None:
        self._new = NewMetrics()

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._new.skip(trainer.run_history)

    def on_evaluation_run_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._new.skip(trainer.run_history)

    def on_train_epoch_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._new.follow(trainer.run_history)  # a subclass may have overridden the start event
        trainer.callback_handler.set_listening(self, False, "on_train_step_checkpoint")

    def on_train_epoch_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._log_new(trainer)

    def on_eval_epoch_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        trainer.callback_handler.set_listening(self, True, "on_train_step_checkpoint")

    def on_train_step_checkpoint(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._log_new(trainer)  # from an evaluation in the middle of the epoch

    def on_epoch_checkpoint(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._log_new(trainer)

    def on_stop_training_error(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._log_new(trainer)

    def on_training_run_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._log_new(trainer)

    def on_evaluation_run_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._log_new(trainer)

    def _log_new(self, trainer: TrainerLike) -> None:
        trainer.callback_handler.set_listening(self, False, "on_train_step_checkpoint")
        metrics = self._new.take(trainer.run_history)
        if metrics:
            self.log_metrics(trainer, metrics)

    def log_metrics(self, trainer: TrainerLike, metrics: dict[str, Any]) -> None:
        """Print metrics on one line.

        :param metrics: new values by name
        """
        trainer.print("  " + ", ".join(f"{name}: {format_metric(value)}" for name, value in metrics.items()))
