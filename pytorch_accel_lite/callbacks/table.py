"""A table of the run: one row per epoch, and a summary at the end."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pytorch_accel_lite.base.environment import in_notebook, is_terminal
from pytorch_accel_lite.base.events import RunInterruptedError
from pytorch_accel_lite.base.protocols import TrainerLike
from pytorch_accel_lite.base.text import wrapped
from pytorch_accel_lite.callbacks.epochs import EpochTable, format_duration, format_value
from pytorch_accel_lite.callbacks.notebook import open_page
from pytorch_accel_lite.callbacks.progress_bar import LogMetricsCallback, PrintProgressCallback, epoch_of, shown_rates

if TYPE_CHECKING:
    from pytorch_accel_lite.base.run_settings import RunRequest
    from pytorch_accel_lite.callbacks.notebook import Page

_NOTEBOOK_COLUMNS = 120


class ProgressTableCallback(LogMetricsCallback):
    """Show a table with a row for each epoch and each evaluation within an epoch, and a summary at the end of the run.

    A terminal prints the rows; a notebook updates the table in place, and shows the last 100 rows and the best. As many
    metrics are shown as fit; the others are in ``trainer.run_history``. The best value so far is marked for the metric
    watched by the first callback that watches one, or else for the evaluation loss.

    If the output is neither a terminal nor a notebook, as in a cluster job's log, it prints the lines of
    :class:`PrintProgressCallback` and :class:`LogMetricsCallback` instead.

    :param metrics: names of the metrics to show, in this order; by default losses come first, then evaluation metrics,
        then any others
    :param show_always: show a table even if the output is a file or a pipe
    """

    def __init__(self, metrics: Sequence[str] | None = None, *, show_always: bool = False) -> None:
        super().__init__()
        if isinstance(metrics, str):
            raise TypeError(f"metrics={metrics!r} must be a list of names. Write: metrics=[{metrics!r}].")
        self.metrics = None if metrics is None else list(metrics)
        self.show_always = show_always
        self._messages = PrintProgressCallback()
        self._shows_table = False
        self._view: _View | None = None  # while a training run is shown
        self._evaluation_start = 0.0

    def configure_run(self, trainer: TrainerLike, request: RunRequest, **kwargs: Any) -> None:
        if request.kind == "training":
            for name in self.metrics or ():
                request.metrics.require(f"{type(self).__name__}(metrics={self.metrics!r})", name)

    def _look_for_terminal(self) -> None:
        self._shows_table = self.show_always or in_notebook() or is_terminal(sys.stdout)

    # ------------------------------------------------------------------------------------------ training

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        super().on_training_run_start(trainer)
        self._look_for_terminal()
        self._view = None
        if self._shows_table:
            self._view = _View(trainer, self.metrics)
            trainer.current_run.end.messages.append(lambda: self._end(trainer))
        else:
            self._messages.on_training_run_start(trainer)

    def on_train_epoch_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        super().on_train_epoch_start(trainer)
        if self._view is None:
            self._messages.on_train_epoch_start(trainer)
        else:
            self._view.start_epoch()

    def on_train_epoch_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        if self._view is None:
            super().on_train_epoch_end(trainer)
        else:
            self._view.finish_training(trainer)

    def log_metrics(self, trainer: TrainerLike, metrics: dict[str, Any]) -> None:
        """Show metrics as a row of the table, or as a line for an evaluation outside training."""
        if not self._shows_table:
            super().log_metrics(trainer, metrics)
        elif self._view is not None:
            self._view.add_row(trainer, metrics)
        else:
            taken = format_duration(time.monotonic() - self._evaluation_start)
            values = ", ".join(f"{name} {format_value(value) or value}" for name, value in metrics.items())
            trainer.print(wrapped(f"Evaluated in {taken}: {values}"))

    def on_exception(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._messages.on_exception(trainer)
        name = type(kwargs["exception"]).__name__
        self._end(trainer, "Interrupted" if name == "KeyboardInterrupt" else f"Failed ({name})")

    def on_training_run_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        if not self._shows_table:
            self._messages.on_training_run_end(trainer)
        super().on_training_run_end(trainer)

    def _end(self, trainer: TrainerLike, how: str | None = None) -> None:
        """Show the summary.

        :param how: how the run ended, if with an error
        """
        view, self._view = self._view, None
        if view is not None:
            view.end(trainer, how)

    # ---------------------------------------------------------------------------------------- evaluation

    def on_evaluation_run_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        if self._view is not None:  # within a training run, metrics belong to the next row
            return
        super().on_evaluation_run_start(trainer)
        self._evaluation_start = time.monotonic()
        if trainer.current_run.outer is None:
            self._look_for_terminal()
        if not self._shows_table:
            self._messages.on_evaluation_run_start(trainer)

    def on_evaluation_run_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        if self._view is not None:
            return
        if not self._shows_table:
            self._messages.on_evaluation_run_end(trainer)
        super().on_evaluation_run_end(trainer)


class _View:
    """The display of one training run.

    :param chosen: names of the metrics that the user wants to see; ``None`` for any
    """

    def __init__(self, trainer: TrainerLike, chosen: list[str] | None) -> None:
        self._chosen = chosen
        self._expected = trainer.current_run.request.metrics
        self._key, self._greater = self._choose_key()
        self._best: tuple[float, str] | None = None
        self._rates = shown_rates(trainer)
        self._table = EpochTable(_label(self._key) if self._key else None)
        self._table.columns = self._ranked(self._expected.directions)
        self._layout: object = None
        self._start = self._epoch_start = time.monotonic()
        self._first_update = trainer.progress.update
        self._first_epoch = trainer.progress.epochs_completed + 1
        self._trained: int | None = None
        self._before = {path: _changed(path) for path in trainer.current_run.request.paths}
        self._page: Page | None = None
        if in_notebook() and trainer.accelerator.is_local_main_process:
            self._page = open_page(trainer)
        if trainer.progress.epochs_completed:
            self._remember_best(trainer)

    def _choose_key(self) -> tuple[str | None, bool]:
        """Return the metric whose best value is marked, and whether larger values are better."""
        for watched in self._expected.watched:
            return watched.name, bool(watched.greater_is_better)
        losses = [name for name in self._expected.evaluated if re.search(r"(^|_)eval_loss_epoch$", name)]
        return min(losses, key=lambda name: name.startswith("ema_"), default=None), False

    def _remember_best(self, trainer: TrainerLike) -> None:
        """Find the best value of the epochs before a resumed run."""
        history: Any = trainer.run_history
        offset = history.current_epoch - 1 - trainer.progress.epochs_completed
        for row in history.rows() if hasattr(history, "rows") else ():
            if row["epoch"] > offset:
                self._note(row, f"epoch {row['epoch'] - offset}")

    def _note(self, metrics: dict[str, Any], where: str) -> bool:
        """Record the value to be marked, and return whether it is the best so far."""
        if self._key not in metrics:
            return False
        value = float(metrics[self._key])
        if self._best is None:
            is_better = value == value  # not NaN
        else:
            is_better = value > self._best[0] if self._greater else value < self._best[0]
        if is_better:
            self._best = value, where
        return is_better

    def _ranked(self, names: Iterable[str]) -> list[str]:
        """Return the columns of metrics in order of importance."""
        if self._chosen is not None:
            return list(dict.fromkeys([*map(_label, self._chosen), *self._rates]))
        evaluated = {_label(name) for name in self._expected.evaluated}
        declared = {_label(name) for name in self._expected.directions}

        def rank(label: str) -> int:
            if label.endswith("train loss"):
                return 0
            if label.endswith("eval loss"):
                return 1
            if label in self._rates:
                return 2
            return 3 if label in evaluated else 4 if label not in declared else 5

        labels = dict.fromkeys([*self._rates, *map(_label, names)])
        labels.pop("time", None)  # of an epoch, which the table has
        return sorted(labels, key=rank)

    def start_epoch(self) -> None:
        self._epoch_start = time.monotonic()

    def finish_training(self, trainer: TrainerLike) -> None:
        self._trained = trainer.progress.epoch
        self._rates = shown_rates(trainer)

    def add_row(self, trainer: TrainerLike, metrics: dict[str, Any]) -> None:
        """Show new metrics of an epoch or of an evaluation within one."""
        progress = trainer.progress
        is_whole = self._trained == progress.epoch
        where = f"epoch {progress.epoch}" + ("" if is_whole else f", step {progress.step}")
        cells = {_label(name): format_value(value) for name, value in metrics.items()}
        for name, rate in (self._rates if is_whole else shown_rates(trainer)).items():
            cells[name] = f"{metrics.get(name, rate):.2e}"  # a callback may have recorded the last update's rate
        cells["epoch"] = epoch_of(trainer) if is_whole else f"step {progress.step}"
        cells["time"] = format_duration(time.monotonic() - self._epoch_start)
        self._table.add(cells, self._note(metrics, where), self._ranked([*self._expected.directions, *metrics]))
        if self._page is not None:
            self._update(self._page)
            return
        layout = self._table.layout(shutil.get_terminal_size().columns)
        head = [] if layout == self._layout else self._table.head(layout)
        self._layout = layout
        trainer.print("\n".join([*head, self._table.last_line(layout)]))

    def _update(self, page: Page, below: Sequence[str] = ()) -> None:
        page.html = self._table.html(_NOTEBOOK_COLUMNS, below)
        page.text = "\n".join([self._table.text(_NOTEBOOK_COLUMNS), *below])
        page.refresh()

    def end(self, trainer: TrainerLike, how: str | None) -> None:
        """Show the summary, unless nothing was trained."""
        if trainer.progress.update == self._first_update and how is None:
            return
        summary = self._summary(trainer, how or _how_it_ended(trainer))
        files = self._written_files(trainer)
        if self._page is None:
            trainer.print("\n".join(["", wrapped(summary), *files]))
        else:
            self._page.bars.clear()
            self._update(self._page, [summary, *files])

    def _summary(self, trainer: TrainerLike, how: str) -> str:
        progress = trainer.progress
        taken = format_duration(time.monotonic() - self._start)
        if how == "Trained":
            first, last = self._first_epoch, progress.epochs_completed
            epochs = f"{last} epoch{'s' * (last > 1)}" if first == 1 else f"epochs {first} to {last}"
            summary = f"Trained {epochs}, {progress.update:,} updates, in {taken}."
        else:
            summary = f"{how} in epoch {progress.epoch}, after update {progress.update:,}, in {taken}."
        if self._best is not None and self._key is not None:
            summary += f" Best: {self._best[1]}, {_label(self._key)} {format_value(self._best[0])}."
        return summary

    def _written_files(self, trainer: TrainerLike) -> Iterator[str]:
        """Yield a line for each file or directory that the run has written."""
        is_resumed = self._first_update > 0
        existing = {
            path: content
            for path, content in trainer.current_run.request.paths.items()
            if (now := _changed(path)) is not None and (is_resumed or now != self._before.get(path))
        }
        width = max(map(len, existing.values()), default=0) + 1
        for path, content in existing.items():
            yield f"  {content + ':':<{width}} {path}"


def _how_it_ended(trainer: TrainerLike) -> str:
    run = trainer.current_run
    if run.end.pause is not None:
        return "Interrupted" if isinstance(run.end.pause, RunInterruptedError) else "Paused"
    return "Trained" if run.end.reason is None else "Stopped"


def _changed(path: str) -> int | None:
    """Return the modification time of a file or directory in ns, or ``None`` if it does not exist."""
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return None


def _label(name: str) -> str:
    """Return a metric's column title, which omits common suffixes; evaluations within epochs share the columns."""
    name = name.replace("intermediate_", "")
    loss = re.fullmatch(r"(.*_)?(train|eval)_(\w+?)(_epoch)?", name)
    if loss and (loss[4] or loss[2] == "eval"):
        return " ".join([*filter(None, [(loss[1] or "").rstrip("_")]), loss[2], loss[3]])
    return name.removesuffix("_epoch")
