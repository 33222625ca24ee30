"""The progress bar of a run."""

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
from pytorch_accel_lite.base.validation import check_positive_number, check_range
from pytorch_accel_lite.callbacks.bars import NotebookBar, NotebookOutput, TerminalBar
from pytorch_accel_lite.callbacks.printing import epoch_of, shown_rates

if TYPE_CHECKING:
    from pytorch_accel_lite.base.run_settings import TrainerRunConfig


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
    """

    def __init__(
        self, show_always: bool = False, refresh_seconds: float = 0.25, *, line_every_seconds: float | None = 30.0
    ) -> None:
        check_range("refresh_seconds", refresh_seconds)
        if line_every_seconds is not None:
            check_positive_number("line_every_seconds", line_every_seconds)
        self.show_always = show_always
        self.refresh_seconds = refresh_seconds
        self.line_every_seconds = line_every_seconds
        self.pbar: Any = None
        self.eval_pbar: Any = None
        self._config: TrainerRunConfig | None = None
        self._run_start = self._epoch_start = self._next_refresh = 0.0
        self._updates_before = self._samples_before = 0
        self._interval = refresh_seconds

    def _start(self, trainer: TrainerLike, loader: Any, description: str, before: Any) -> Any:
        if before is not None:  # for example, of an evaluation that failed
            before.close()
        arguments = {
            "desc": description,
            "total": find_length(loader),
            "unit": "batches",
            "mininterval": self.refresh_seconds,
            "disable": not self._shows_bars(trainer),
        }
        return NotebookBar(NotebookOutput.of(trainer), **arguments) if in_notebook() else TerminalBar(**arguments)

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
        self.pbar.close()

    def on_eval_epoch_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self.eval_pbar = self._start(trainer, trainer.eval_dataloader, "Evaluating", self.eval_pbar)

    def on_eval_step_end(self, trainer: TrainerLike, *args: Any, **kwargs: Any) -> None:
        if not self.eval_pbar.n:  # a later callback may have limited the evaluation
            self.eval_pbar.total = find_length(trainer.eval_dataloader)
        self.eval_pbar.update(1)

    def on_eval_epoch_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self.eval_pbar.close()

    def on_predict_run_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self.eval_pbar = self._start(trainer, trainer.eval_dataloader, "Predicting", self.eval_pbar)

    def on_predict_step_end(self, trainer: TrainerLike, *args: Any, **kwargs: Any) -> None:
        self.eval_pbar.update(1)

    def on_predict_run_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self.eval_pbar.close()
        self.on_evaluation_run_end(trainer)

    def on_evaluation_run_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        if not trainer.is_running or trainer.train_dataloader is None:  # outside a training run
            self._close(trainer)

    def on_training_run_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._close(trainer)

    def on_stop_training_error(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._close(trainer)

    def on_exception(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._close(trainer)

    def _close(self, trainer: TrainerLike) -> None:
        for bar in (self.pbar, self.eval_pbar):
            if bar is not None:
                bar.close()
        if in_notebook():
            NotebookOutput.leave(trainer)
