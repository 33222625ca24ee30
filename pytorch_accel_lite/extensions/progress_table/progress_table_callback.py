"""The default output of runs and evaluations: a table with a row for each epoch, or lines, and a summary."""

from __future__ import annotations

import math
import os
import re
import shutil
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from pytorch_accel_lite.extending import RunInterruptedError, RunRequest, TrainerLike
from pytorch_accel_lite.extension_tools.arguments_and_errors import check_names, check_positive_int, optional
from pytorch_accel_lite.extension_tools.data_and_batches import find_length
from pytorch_accel_lite.extension_tools.metrics_and_callbacks import (
    LogMetricsCallback,
    MetricValue,
    epoch_of,
    improvement,
    set_own_listening,
)
from pytorch_accel_lite.extension_tools.optimizers_and_gradients import current_rates
from pytorch_accel_lite.extension_tools.runs_and_steps import is_stepped_after_updates
from pytorch_accel_lite.extension_tools.texts_and_pages import (
    escape_unprintable,
    format_duration,
    html_table,
    in_notebook,
    shows_live,
    to_number,
    wrapped,
)
from pytorch_accel_lite.extensions.progress_bar import NotebookOutput
from pytorch_accel_lite.extensions.progress_table.held_output import HeldOutput
from pytorch_accel_lite.utils import format_metric, format_value

_GAP = "  "
_WIDTH = 9  # minimum of a column, to fit numbers
_TIME_WIDTH = len("59.9s")
_NOTEBOOK_WIDTH = 120
_LONG_RUN = 60  # seconds of a run after which the summary shows how its time was spent
_NOTEBOOK_ROWS = 100  # limited: a notebook gets the whole table after every epoch

Row = dict[str, MetricValue]  # values by column, among them "epoch" and "time"


class ProgressTableCallback(LogMetricsCallback):
    """Show a table with a row for each epoch and each evaluation within an epoch, and a summary at the end of the run.

    A terminal prints the rows; a notebook updates the table in place, and shows the last 100 rows and the best. As many
    metrics are shown as fit; the others are in ``trainer.run_history``. The best value so far is marked for the metric
    of the first callback that watches a metric, or else for the evaluation loss. A column changes its number format at
    most once: to powers of ten, when a value is too large or too small for four decimals.

    If the output is neither a terminal nor a notebook, as in a cluster job's log, it prints the lines of
    ``PrintProgressCallback`` and ``LogMetricsCallback`` instead, a line of times and rates after each epoch,
    and the summary.

    Args:
        metrics: names of the metrics to show, in this order; by default losses come first, then evaluation metrics,
            then any others
        show_always: show a table even if the output is a file or a pipe
        row_every_n_updates: number of updates between rows within an epoch; their training losses are means since the
            previous row. By default, only epochs of data without a length have such rows: about 20 in
            ``max_num_train_steps``, but at least 10 updates apart, or every 500 updates.
    """

    def __init__(
        self, metrics: Sequence[str] | None = None, *, show_always: bool = False, row_every_n_updates: int | None = None
    ) -> None:
        super().__init__()
        if row_every_n_updates is not None:
            check_positive_int("row_every_n_updates", row_every_n_updates)
        self.metrics = optional(check_names, "metrics", metrics)
        self.show_always = show_always
        self.row_every_n_updates = row_every_n_updates
        self._shows_table = False
        self._table: _RunTable | None = None  # during a training run
        self._running_means: dict[str, float] = {}
        self._evaluation_start = 0.0
        self._held: HeldOutput | None = None  # output of callbacks at the end of an epoch, until its row is shown

    def configure_run(self, trainer: TrainerLike, request: RunRequest, **kwargs: object) -> None:
        for name in self.metrics or ():
            request.metrics.require(f"{type(self).__name__}(metrics={self.metrics!r})", name)

    def _choose_form(self) -> None:
        self._shows_table = self.show_always or shows_live(sys.stdout)

    def _announce(self, trainer: TrainerLike, text: str) -> None:
        if not self._shows_table:
            trainer.print(text)

    # ------------------------------------------------------------------------------------------ training

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        super().on_training_run_start(trainer)
        self._choose_form()
        self._announce(trainer, "Starting training run")
        self._table = _RunTable(trainer, self.metrics, self._shows_table)
        self._running_means = {}
        self._row_every = self.row_every_n_updates or _default_interval(trainer)
        if self._row_every and not trainer.ranks.result_of_first(lambda: self._shows_table):
            self._row_every = None  # set on all processes, which add up their losses for a row
        set_own_listening(trainer, self, self._row_every is not None, "on_update_end")
        set_own_listening(trainer, self, is_stepped_after_updates(trainer), "on_optimizer_step_start")
        trainer.run.end.last_calls.append(partial(self._end_table, trainer))

    def on_train_epoch_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        super().on_train_epoch_start(trainer)
        self._announce(trainer, f"Starting epoch {epoch_of(trainer)}")
        if self._table is not None:
            self._table.begin_row(trainer)

    def on_optimizer_step_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        if self._table is not None:  # now: the schedule sets the next rate before the epoch ends
            self._table.rates_used = current_rates(trainer)

    def on_update_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        if self._table is None or self._row_every is None or trainer.progress.update % self._row_every:
            return
        if not trainer.run.is_finished:
            self._running_means = self._table.means_since_last_row(trainer)
            # An evaluation at this update belongs to the same row.
            set_own_listening(trainer, self, True, "on_train_step_checkpoint")

    def _new_metrics(self, trainer: TrainerLike, passing: Collection[str] = ()) -> dict[str, MetricValue]:
        means, self._running_means = self._running_means, {}
        return means | super()._new_metrics(trainer, passing)

    def on_train_epoch_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        if self._table is not None:
            self._table.note_training(trainer)
        if not self._shows_table:
            super().on_train_epoch_end(trainer)

    def on_training_run_epoch_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        if self._table is not None and self._held is None and not in_notebook():
            self._held = HeldOutput()

    @contextmanager
    def _before_what_is_held(self) -> Iterator[None]:
        held, self._held = self._held, None
        if held is not None:
            held.restore()
        try:
            yield
        finally:
            if held is not None:
                held.flush()

    def on_epoch_checkpoint(self, trainer: TrainerLike, **kwargs: object) -> None:
        with self._before_what_is_held():
            super().on_epoch_checkpoint(trainer)
            self._show_times(trainer)

    def on_stop_training_error(self, trainer: TrainerLike, **kwargs: object) -> None:
        with self._before_what_is_held():
            super().on_stop_training_error(trainer)
            end = trainer.run.end
            if end.is_regular and self._table is not None and not self._table.is_within_epoch(trainer):
                self._show_times(trainer)

    def on_training_run_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        with self._before_what_is_held():
            super().on_training_run_end(trainer)
            if trainer.run.end.is_regular:  # a row for an epoch that was stopped in the middle
                self._show_times(trainer)

    def _show_times(self, trainer: TrainerLike) -> None:
        if self._table is not None and (times := self._table.times_and_rates(trainer)):
            self._announce(trainer, f"  {times}")

    def log_metrics(self, trainer: TrainerLike, metrics: dict[str, MetricValue]) -> None:
        """Show metrics as a row of the table or as a line."""
        if self._table is None:
            duration = format_duration(time.monotonic() - self._evaluation_start)
            values = ", ".join(f"{name} {format_metric(value)}" for name, value in metrics.items())
            trainer.print(wrapped(f"Evaluated in {duration}: {values}"))
            return
        self._table.add_row(trainer, metrics)
        if not self._shows_table:
            step = {"step": trainer.progress.step} if self._table.is_within_epoch(trainer) else {}
            super().log_metrics(trainer, step | metrics)

    def on_exception(self, trainer: TrainerLike, **kwargs: object) -> None:
        with self._before_what_is_held():
            super().on_exception(trainer)
        error = kwargs["exception"]
        interrupted = isinstance(error, KeyboardInterrupt)
        self._end_table(trainer, "Interrupted" if interrupted else f"Failed ({type(error).__name__})")

    def _end_table(self, trainer: TrainerLike, failure: str = "") -> None:
        run_table, self._table = self._table, None
        if run_table is not None:
            run_table.end(trainer, failure)

    # ---------------------------------------------------------------------------------------- evaluation

    def on_evaluation_run_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        if self._table is None:  # within a training run, its metrics belong to the next row
            super().on_evaluation_run_start(trainer)
            self._choose_form()
            self._announce(trainer, "Starting evaluation run")
            self._evaluation_start = time.monotonic()

    def on_evaluation_run_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        if self._table is None:
            super().on_evaluation_run_end(trainer)


class _RunTable:
    """The rows and the summary of a training run. The time to add a row does not grow with their number.

    Args:
        trainer: the trainer of the run
        chosen: names of the metrics that the user wants to see; ``None`` for any
        is_drawn: whether rows are drawn as a table

    Attributes:
        rates_used: the learning rates of the latest update, if the schedule sets another rate after each update
    """

    def __init__(self, trainer: TrainerLike, chosen: list[str] | None, is_drawn: bool) -> None:
        self._chosen = chosen
        self._is_drawn = is_drawn
        self._expected = trainer.run.request.metrics
        self._marked_metric, self._greater_is_better = self._choose_marked()
        self._marked_column = _title(self._marked_metric)
        self._best: tuple[float, str] | None = None
        self._best_row: Row | None = None
        self._rows: list[Row] = []
        self.rates_used: dict[str, float | torch.Tensor] = {}
        self._rates = _shown_rates(trainer)
        self._scientific = set(self._rates)  # columns with powers of ten
        self._names = dict.fromkeys(self._expected.directions)  # names of expected or recorded metrics
        self._recorded: set[str] = set()
        self._layout: dict[str, int] = {}  # widths of the shown columns
        self._terminal_width = 0
        self._epoch_width = max(len(epoch_of(trainer)), len(f"step {_num_steps(trainer)}"))
        self._start = self._epoch_start = time.monotonic()
        self._evaluations_before = 0.0  # seconds of evaluations before the current epoch
        self._first = replace(trainer.progress)
        self._trained_epoch = self._timed_epoch = 0
        self._speed = ""  # samples per second of the latest epoch's training part
        self._samples_before = 0  # samples before the current epoch
        self._sums: dict[str, tuple[float, float]] = {}  # sums of losses and weights at the previous row
        self._times_before = {path: _modification_time(path) for path in trainer.run.request.paths}
        self._output: NotebookOutput | None = None
        if is_drawn and in_notebook() and trainer.accelerator.is_local_main_process:
            NotebookOutput.leave(trainer)
            self._output = NotebookOutput.of(trainer)
        if trainer.progress.epochs_completed:
            self._find_earlier_best(trainer)

    # ----------------------------------------------------------------------------------- what is shown

    def _choose_marked(self) -> tuple[str, bool]:
        """Return the metric whose best value is marked, if any, and whether larger values are better."""
        losses = (name for name in self._expected.evaluated if re.search(r"(^|_)eval_loss_epoch$", name))
        watched = {metric.name: bool(metric.greater_is_better) for metric in self._expected.watched}
        possible = watched or dict.fromkeys(losses, False)
        # The best model of a run has trained weights. Averaged weights are saved separately.
        name = min(possible, key=lambda name: name.startswith("ema_"), default="")
        return name, possible.get(name, False)

    def _find_earlier_best(self, trainer: TrainerLike) -> None:
        """Find the best value in the epochs before the point at which the run resumes."""
        history = trainer.run_history
        offset = history.current_epoch - 1 - trainer.progress.epochs_completed
        for row in history.rows() if hasattr(history, "rows") else ():
            if row["epoch"] > offset:
                self._update_best(row, f"epoch {row['epoch'] - offset}")

    def _update_best(self, metrics: dict[str, MetricValue], position: str) -> bool:
        """Return whether the value of the marked metric is the best so far, and remember it if so."""
        value = float(metrics.get(self._marked_metric, math.nan))
        worst = -math.inf if self._greater_is_better else math.inf
        best = worst if self._best is None else self._best[0]
        is_better = improvement(value, best, self._greater_is_better) > 0
        if is_better:
            self._best = value, position
        return is_better

    def _columns(self) -> list[str]:
        """Return the columns of metrics in order of importance."""
        if self._chosen is not None:
            return list(dict.fromkeys([*map(_title, self._chosen), *self._rates]))
        evaluated = {_title(name) for name in self._expected.evaluated}
        declared = {_title(name) for name in self._expected.directions}

        def rank(title: str) -> int:
            if title.endswith(("train loss", "eval loss")):
                return 0 if title.endswith("train loss") else 1
            if title in self._rates:
                return 2
            return 3 if title in evaluated else 4 if title not in declared else 5

        titles = dict.fromkeys([*self._rates, *map(_title, self._names)])
        titles.pop("time", None)  # the table has a column for the time of an epoch
        return sorted(titles, key=rank)

    def begin_row(self, trainer: TrainerLike) -> None:
        """Note the start of an epoch."""
        self._epoch_start = time.monotonic()
        self._evaluations_before = trainer.run.goodput.seconds["evaluation"]
        self._samples_before = trainer.progress.samples
        self._sums = {}

    def note_training(self, trainer: TrainerLike) -> None:
        """Note the learning rates and the speed at the end of the training part of an epoch."""
        self._trained_epoch = trainer.progress.epoch
        self._rates = self._current_rates(trainer)
        evaluating = trainer.run.goodput.seconds["evaluation"] - self._evaluations_before
        seconds = time.monotonic() - self._epoch_start - evaluating
        self._speed = _speed(trainer.progress.samples - self._samples_before, seconds)

    def _current_rates(self, trainer: TrainerLike) -> dict[str, float]:
        """Return the learning rates of the latest update."""
        return {name: float(rate) for name, rate in self.rates_used.items()} or _shown_rates(trainer)

    def is_within_epoch(self, trainer: TrainerLike) -> bool:
        """Return whether the training part of the current epoch is still running."""
        return self._trained_epoch != trainer.progress.epoch

    def means_since_last_row(self, trainer: TrainerLike) -> dict[str, float]:
        """Return the means of the training losses since the previous row of this epoch. A collective operation."""
        sums = trainer.run.loss_trackers.summed(trainer.ranks)
        means = {}
        for name, (total, weight) in sums.items():
            total_before, weight_before = self._sums.get(name, (0.0, 0.0))
            if name and weight > weight_before:
                means[f"train_{name}_epoch"] = (total - total_before) / (weight - weight_before)
        self._sums = sums
        return means

    def times_and_rates(self, trainer: TrainerLike) -> str:
        """Return the time of an epoch, the samples per second of its training part, and the learning rates.

        The text is empty if it has already been returned for the epoch, or if the epoch had no update.
        """
        epoch, is_trained = trainer.progress.epoch, trainer.progress.samples > self._samples_before
        if self._timed_epoch == epoch or not (is_trained or trainer.progress.epochs_completed == epoch):
            return ""
        if self.is_within_epoch(trainer):
            self.note_training(trainer)
        self._timed_epoch = epoch
        duration = format_duration(time.monotonic() - self._epoch_start)
        rates = [f"{name}: {format_metric(rate)}" for name, rate in self._rates.items()]
        return ", ".join([f"time: {duration}", f"samples/s: {self._speed}", *rates])

    def add_row(self, trainer: TrainerLike, metrics: dict[str, MetricValue]) -> None:
        """Add the new metrics of an epoch, or of an evaluation within one, and show them as a row of the table."""
        step = f"step {trainer.progress.step}" if self.is_within_epoch(trainer) else ""
        is_best = self._update_best(metrics, f"epoch {trainer.progress.epoch}" + (f", {step}" if step else ""))
        if not self._is_drawn:
            return
        numbers = {name: to_number(value) for name, value in metrics.items() if format_value(value)}
        self._names |= dict.fromkeys(numbers)
        self._recorded |= numbers.keys()
        if not step:  # later, new metrics can only come from evaluations
            possible = self._recorded | self._expected.evaluated.keys()
            self._names = {name: None for name in self._names if name in possible}
        row: Row = {**(self._current_rates(trainer) if step else self._rates)}
        row |= {_title(name): value for name, value in numbers.items()}  # a metric may be the rate of the last update
        row["epoch"] = step or epoch_of(trainer)
        row["time"] = format_duration(time.monotonic() - self._epoch_start)
        self._scientific |= {name for name, value in row.items() if _needs_power(value)}
        self._best_row = row if is_best else self._best_row
        self._rows.append(row)
        if self._output is not None:
            self._update(self._output)
            return
        width = shutil.get_terminal_size().columns
        layout = self._fit(width, self._layout if width == self._terminal_width else {})
        head = [] if layout == self._layout else self._head(layout)
        self._layout, self._terminal_width = layout, width
        trainer.print("\n".join([*head, self._line(row, layout)]))

    # ------------------------------------------------------------------------------------ how it is shown

    def _fit(self, width: int, previous: dict[str, int]) -> dict[str, int]:
        """Return the widths of as many columns as fit, with new columns to the right of the previous ones.

        At least one metric is shown, however narrow the terminal.
        """
        layout = previous or {"epoch": self._epoch_width, "time": _TIME_WIDTH}
        available = width - sum(layout.values()) - len(_GAP) * (len(layout) - 1)
        added: dict[str, int] = {}
        for column in self._columns():
            needed = max(len(column), _WIDTH) + (column == self._marked_column)
            if column not in layout and (len(_GAP) + needed <= available or not (previous or added)):
                added[column] = needed
                available -= len(_GAP) + needed
        if previous:
            return previous | added
        rates_last = {column: added[column] for column in sorted(added, key=lambda name: name in self._rates)}
        return {"epoch": self._epoch_width, **rates_last, "time": _TIME_WIDTH}

    def _omitted(self, layout: dict[str, int]) -> list[str]:
        recorded = {*map(_title, self._names)}  # the history has no learning rate unless a callback records it
        count = len([title for title in self._columns() if title in recorded and title not in layout])
        return [f"({count} more metric{'s are' if count > 1 else ' is'} in trainer.run_history)"] if count else []

    def _cell(self, row: Row, column: str) -> str:
        value = row.get(column, "")
        return value if isinstance(value, str) else format_value(value, column in self._scientific)

    def _line(self, row: Row, layout: dict[str, int]) -> str:
        """Return a row as a line of text, the first cell aligned to the left."""
        cells = {column: self._cell(row, column) for column in layout}
        if cells.get(self._marked_column):
            cells[self._marked_column] += "*" if row is self._best_row else " "
        line = _GAP.join(f"{cell:>{layout[column]}}" for column, cell in cells.items() if column != "epoch")
        return f"{cells['epoch']:<{layout['epoch']}}{_GAP}{line}"

    def _head(self, layout: dict[str, int]) -> list[str]:
        line = self._line({column: column for column in layout}, layout)
        return [*self._omitted(layout), line, "-" * len(line)]

    def _update(self, output: NotebookOutput, summary: Sequence[str] = ()) -> None:
        """Show the latest rows and the best row in a notebook."""
        layout = self._fit(_NOTEBOOK_WIDTH, {})
        rows = self._rows[-_NOTEBOOK_ROWS:]
        columns = list(layout) if rows or not summary else []  # a run that ends without a row needs no header
        notes = self._omitted(layout)
        if len(rows) < len(self._rows):
            total = f"{len(self._rows):,} rows; all metrics are in trainer.run_history"
            notes.insert(0, f"(the last {len(rows)} of {total})")
            if self._best_row is not None and all(row is not self._best_row for row in rows):
                rows.insert(0, self._best_row)
        bold = None
        if self._best_row in rows and self._marked_column in columns:
            bold = rows.index(self._best_row), columns.index(self._marked_column)
        cells = [[self._cell(row, column) for column in columns] for row in rows]
        output.html = html_table("", cells, columns, [*notes, *summary], () if bold is None else [bold])
        head = self._head(layout)[-2:] if columns else []
        output.text = "\n".join([*notes, *head, *(self._line(row, layout) for row in rows), *summary])
        output.refresh()

    # ------------------------------------------------------------------------------------------- the end

    def end(self, trainer: TrainerLike, failure: str) -> None:
        """Show the summary, unless nothing was trained.

        Args:
            failure: how the run ended, if an error ended it
        """
        if trainer.progress.update == self._first.update and not failure:
            return
        summary = [*self._summary(trainer, failure or _outcome(trainer)), *self._written_files(trainer)]
        if self._output is None:
            trainer.print("\n".join(["", *summary] if self._is_drawn else summary))
        else:
            self._output.bars.clear()
            self._update(self._output, summary)

    def _summary(self, trainer: TrainerLike, outcome: str) -> list[str]:
        progress = trainer.progress
        if outcome == "Trained":
            first, last = self._first.epochs_completed + 1, progress.epochs_completed
            epochs = f"{last} epoch{'s' * (last > 1)}" if first == 1 else f"epochs {first} to {last}"
            summary = f"Trained {epochs}, {progress.update - self._first.update:,} updates,"
        else:
            summary = f"{outcome} in epoch {progress.epoch}, after update {progress.update:,},"
        seconds = time.monotonic() - self._start
        if not progress.epoch:
            return [f"{outcome} before the first epoch, after {format_duration(seconds)}."]
        speed = _speed(progress.samples - self._first.samples, seconds)
        lines = [f"{summary} in {format_duration(seconds)} ({speed} samples/s)."]
        if self._best is not None:
            value = format_value(self._best[0]) if self._is_drawn else format_metric(self._best[0])  # as shown before
            lines.append(f"Best: {self._best[1]}, {self._marked_column} {value}.")
        goodput = trainer.run.goodput
        if goodput.is_resumed or sum(goodput.seconds.values()) >= _LONG_RUN:
            lines.append(f"Time{' of all attempts' if goodput.is_resumed else ''}: {goodput}.")
        return [wrapped(line) for line in lines]

    def _written_files(self, trainer: TrainerLike) -> list[str]:
        """Return a line for each file or directory that the run has written."""
        is_resumed = self._first.update > 0
        rows = [
            (f"  {content}:", path)
            for path, content in trainer.run.request.paths.items()
            if (changed := _modification_time(path)) and (is_resumed or changed != self._times_before.get(path))
        ]
        width = max((len(content) for content, _ in rows), default=0)
        return [f"{content:<{width}} {escape_unprintable(path)}" for content, path in rows]


def _speed(samples: int, seconds: float) -> str:
    return f"{samples / seconds:,.0f}" if seconds > 0 else "0"


def _shown_rates(trainer: TrainerLike) -> dict[str, float]:
    return {name: float(rate) for name, rate in current_rates(trainer).items()}


def _default_interval(trainer: TrainerLike) -> int | None:
    """Return the number of updates between rows within an epoch of unknown length; ``None`` for other epochs."""
    if find_length(trainer.train_dataloader) is not None:
        return None
    updates = trainer.run.request.max_num_train_steps
    return 500 if updates is None else max(int(float(f"{updates / 20:.0e}")), 10)


def _num_steps(trainer: TrainerLike) -> int:
    """Return an upper bound of the steps of an epoch if it is known, or else a typical number."""
    request = trainer.run.request
    limit = (request.max_num_train_steps or 0) * trainer.run.accumulation.largest
    return max(find_length(trainer.train_dataloader) or limit, 100)


def _needs_power(value: MetricValue) -> bool:
    """Return whether a value needs scientific notation."""
    text = "" if isinstance(value, str) else format_value(value)
    return len(text) > _WIDTH or "e" in text


def _outcome(trainer: TrainerLike) -> str:
    end = trainer.run.end
    if end.pause is not None:
        return "Interrupted" if isinstance(end.pause, RunInterruptedError) else "Paused"
    return "Trained" if end.reason is None else "Stopped"


def _modification_time(path: str) -> int | None:
    """Return the modification time of a file or directory in ns, or ``None`` if it does not exist."""
    return os.stat(path).st_mtime_ns if os.path.exists(path) else None


def _title(name: str) -> str:
    """Return a metric's column title, without common suffixes; evaluations within epochs share the columns."""
    name = escape_unprintable(name.replace("intermediate_", ""))
    loss = re.fullmatch(r"(?P<prefix>.*_)?(?P<phase>train|eval)_(?P<loss>\w+?)(?P<epoch>_epoch)?", name)
    if loss and (loss["epoch"] or loss["phase"] == "eval"):
        prefix = (loss["prefix"] or "").rstrip("_")
        return " ".join([*filter(None, [prefix]), loss["phase"], loss["loss"]])
    return name.removesuffix("_epoch")
