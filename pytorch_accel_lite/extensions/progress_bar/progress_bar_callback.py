"""The progress bar of a run."""

from __future__ import annotations

import math
import sys
import time

import torch
from tqdm import tqdm

from pytorch_accel_lite.data import ShardedLoader
from pytorch_accel_lite.extending import TrainerCallback, TrainerLike
from pytorch_accel_lite.extension_tools.arguments_and_errors import check_positive_number, check_range
from pytorch_accel_lite.extension_tools.data_and_batches import find_length
from pytorch_accel_lite.extension_tools.metrics_and_callbacks import epoch_of, set_own_listening
from pytorch_accel_lite.extension_tools.modules_and_devices import AsyncCopy, is_asynchronous, to_float
from pytorch_accel_lite.extension_tools.optimizers_and_gradients import current_rates
from pytorch_accel_lite.extension_tools.runs_and_steps import is_stepped_after_updates
from pytorch_accel_lite.extension_tools.texts_and_pages import escape_unprintable, in_notebook, shows_live
from pytorch_accel_lite.extensions.progress_bar.tqdm_bars import Bar, NotebookBar, NotebookOutput, TerminalBar
from pytorch_accel_lite.run_config import TrainerRunConfig


class _Speed:
    """Samples and seconds of training, decaying exponentially with a time constant of ten seconds.

    Attributes:
        samples: the decaying number of samples
        seconds: the decaying time; 0 until the end of the first step, which may take much longer than others
    """

    def __init__(self) -> None:
        self.samples = self.seconds = 0.0
        self._last: tuple[int, float] | None = None

    def mark(self, samples: int, now: float) -> None:
        """Leave out the time since the last mark, because it was not spent on training."""
        self._last = samples, now

    def add(self, samples: int, now: float) -> None:
        """Add the samples since the last mark."""
        if self._last is not None and now > self._last[1]:
            seconds = now - self._last[1]
            decay = max(math.exp(-seconds / 10), 0.8)  # at least about five steps count, however long they take
            self.samples = decay * self.samples + samples - self._last[0]
            self.seconds = decay * self.seconds + seconds
        self.mark(samples, now)


class ProgressBarCallback(TrainerCallback):
    """Show a progress bar for each training epoch and each evaluation, in a terminal or a notebook.

    The bar of an epoch shows the running mean of the loss, the remaining time of the run if its length is known, the
    samples per second over all processes, averaged over about the last ten seconds of training, the latest evaluation
    loss and the learning rate of each optimizer in the latest update. The bar of an evaluation or a prediction shows
    its own remaining time. The loss is copied from the device only to be shown, a few times per second, and no step
    waits for the copy. A narrow terminal shows only the first of these numbers that fit beside a bar of at least ten
    columns; printed text appears above the bar. Only the first process of each machine shows bars, and only if its
    output is a terminal or a notebook; otherwise, as in a cluster job's log, the process prints a line at intervals.

    Args:
        show_always: show bars even if the output is a file or a pipe
        refresh_seconds: seconds between refreshes of the bar
        line_every_seconds: seconds between lines where there are no bars; ``None`` prints no lines

    Attributes:
        pbar: the bar of the training epoch; ``None`` before the first epoch
        eval_pbar: the bar of the evaluation or prediction; ``None`` before the first one
    """

    affects_training = False
    arguments_may_differ = True

    def __init__(
        self, show_always: bool = False, refresh_seconds: float = 0.25, *, line_every_seconds: float | None = 30.0
    ) -> None:
        check_range("refresh_seconds", refresh_seconds)
        if line_every_seconds is not None:
            check_positive_number("line_every_seconds", line_every_seconds)
        self.show_always = show_always
        self.refresh_seconds = refresh_seconds
        self.line_every_seconds = line_every_seconds
        self.pbar: Bar = None  # type: ignore[assignment]
        self.eval_pbar: Bar = None  # type: ignore[assignment]
        self._config: TrainerRunConfig | None = None
        self._run_start = self._eval_start = self._next_refresh = 0.0
        self._updates_before = 0
        self._interval = refresh_seconds
        self._speed = _Speed()
        self._copy: AsyncCopy | None = None  # the copy of the running loss
        self._rates_used: dict[str, float | torch.Tensor] = {}

    def _new_bar(
        self, trainer: TrainerLike, loader: ShardedLoader | None, description: str, previous: Bar | None
    ) -> Bar:
        """Return a new bar in place of the previous one, which a failed evaluation may have left open."""
        if previous is not None:
            previous.close()
        is_main = trainer.accelerator.is_local_main_process
        shows_bars = is_main and (self.show_always or shows_live(sys.stderr))
        between_lines = self.line_every_seconds if is_main else None
        self._interval = self.refresh_seconds if shows_bars else between_lines or math.inf
        now = time.monotonic()
        if shows_bars:
            self._next_refresh = now
        elif self._next_refresh <= now:
            self._next_refresh = now + self._interval
        arguments = {
            "desc": description,
            "total": find_length(loader),
            "unit": "batches",
            "mininterval": self.refresh_seconds,
            "disable": not shows_bars,
        }
        return NotebookBar(NotebookOutput.of(trainer), **arguments) if in_notebook() else TerminalBar(**arguments)

    def on_train_epoch_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        self.pbar = self._new_bar(trainer, trainer.train_dataloader, f"Epoch {epoch_of(trainer)}", self.pbar)
        self._copy = None
        now = time.monotonic()
        if trainer.run_config is not self._config:  # the first epoch of a run: a subclass may override the start event
            self._config = trainer.run_config
            self._run_start = now
            self._updates_before = trainer.progress.update
            self._speed = _Speed()
            self._rates_used = {}
            set_own_listening(trainer, self, is_stepped_after_updates(trainer), "on_optimizer_step_start")
        else:
            self._leave_out(trainer)
        if not self.pbar.disable:
            self.pbar.update(trainer.progress.step)

    def on_optimizer_step_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        self._rates_used = current_rates(trainer)  # now: the schedule sets the next rate before the bar shows this one

    def on_train_step_end(self, trainer: TrainerLike, *args: object, **kwargs: object) -> None:
        now = time.monotonic()
        if now >= self._next_refresh and (loss := self._read_loss(trainer)) is not None:
            self._refresh(trainer, self.pbar, trainer.progress.step, self._numbers(trainer, now, loss), now)

    def _read_loss(self, trainer: TrainerLike) -> float | None:
        """Return the running loss; from a device, ``None`` until its copy has arrived. No step waits for the copy."""
        tracker = trainer.run.loss_trackers["loss"]
        total = tracker.total_loss
        if not isinstance(total, torch.Tensor) or not is_asynchronous(total.device):
            return float(tracker.average)
        if self._copy is None:
            self._copy = AsyncCopy(total / tracker.running_count)
        if not self._copy.has_arrived:
            return None
        loss = to_float(self._copy.read())
        self._copy = None
        return loss

    def _refresh(self, trainer: TrainerLike, bar: Bar, step: int, numbers: dict[str, str], now: float) -> None:
        """Show the progress of an epoch or an evaluation, on its bar or as a line."""
        self._next_refresh = now + self._interval
        if bar.disable:
            total = "" if bar.total is None else f"/{bar.total}"
            text = ", ".join(f"{name} {value}" for name, value in numbers.items())
            trainer.print(f"{bar.desc}, step {step}{total}: {text}")
        else:
            bar.set_postfix(numbers, refresh=False)
            bar.update(step - bar.n)

    def _numbers(self, trainer: TrainerLike, now: float, loss: float) -> dict[str, str]:
        """Return the values to show by name, the most important first."""
        numbers = {"loss": f"{loss:.4g}"}
        config = trainer.run_config
        progress = trainer.progress
        num_updates = progress.update - self._updates_before
        if config is not None and config.max_num_train_steps is not None and num_updates:
            # Includes the evaluations and saving done so far.
            remaining = (now - self._run_start) / num_updates * (config.max_num_train_steps - progress.update)
            numbers["run ETA"] = tqdm.format_interval(remaining)
        self._speed.add(progress.samples, _training_time(trainer))
        if self._speed.seconds:
            numbers["samples/s"] = f"{self._speed.samples / self._speed.seconds:,.0f}"
        evaluated = trainer.run_history.get_metric_values("eval_loss_epoch")
        if evaluated:
            numbers["eval_loss"] = f"{float(evaluated[-1]):.4g}"
        rates = self._rates_used or current_rates(trainer)
        return numbers | {name: f"{float(rate):.3g}" for name, rate in rates.items()}

    def on_train_epoch_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        if not self.pbar.disable:
            now = time.monotonic()
            loss = trainer.run.loss_trackers["loss"].average
            self._refresh(trainer, self.pbar, trainer.progress.step, self._numbers(trainer, now, loss), now)
        self.pbar.close()

    def on_eval_epoch_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        name = trainer.run.data.eval_dataset_name
        self._begin_inference(trainer, "Evaluating" if name is None else f"Evaluating {escape_unprintable(name)}")

    def _begin_inference(self, trainer: TrainerLike, description: str) -> None:
        self.eval_pbar = self._new_bar(trainer, trainer.eval_dataloader, description, self.eval_pbar)
        self._eval_start = time.monotonic()
        self._eval_step = 0

    def on_eval_step_end(self, trainer: TrainerLike, *args: object, **kwargs: object) -> None:
        self._eval_step += 1
        now = time.monotonic()
        if now >= self._next_refresh:
            total = self.eval_pbar.total = find_length(trainer.eval_dataloader)  # a later callback may have limited it
            numbers = {}
            if total is not None:
                remaining = (now - self._eval_start) / self._eval_step * (total - self._eval_step)
                numbers["ETA"] = tqdm.format_interval(remaining)
            self._refresh(trainer, self.eval_pbar, self._eval_step, numbers, now)

    def on_eval_epoch_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        self.eval_pbar.close()

    def on_predict_run_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        self._begin_inference(trainer, "Predicting")

    on_predict_step_end = on_eval_step_end

    def on_predict_run_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        self.eval_pbar.close()
        self.on_evaluation_run_end(trainer)

    def _leave_out(self, trainer: TrainerLike) -> None:
        """Leave the time since the last refresh out of the speed."""
        self._speed.mark(trainer.progress.samples, _training_time(trainer))

    def on_evaluation_run_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        self._leave_out(trainer)  # it includes the time to begin and end the evaluation or the prediction
        if not trainer.is_running or trainer.train_dataloader is None:  # outside a training run
            self._close(trainer)

    def on_training_run_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        self._close(trainer)

    on_stop_training_error = on_exception = on_training_run_end

    def _close(self, trainer: TrainerLike) -> None:
        for bar in (self.pbar, self.eval_pbar):
            if bar is not None:
                bar.close()
        if in_notebook():
            NotebookOutput.leave(trainer)


def _training_time(trainer: TrainerLike) -> float:
    """Return the time by a clock that stands still during evaluations, also those that show no bar."""
    return time.monotonic() - trainer.run.goodput.seconds["evaluation"]
