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
from pytorch_accel_lite.base.inspection import find_length
from pytorch_accel_lite.base.protocols import TrainerLike
from pytorch_accel_lite.base.reprs import table
from pytorch_accel_lite.base.text import format_duration, format_value, wrapped
from pytorch_accel_lite.callbacks.bars import NotebookOutput
from pytorch_accel_lite.callbacks.printing import LogMetricsCallback, PrintProgressCallback, epoch_of, shown_rates

if TYPE_CHECKING:
    from pytorch_accel_lite.base.run_settings import RunRequest

_GAP = "  "
_MIN_WIDTH = 9  # of a column, in which nearly all numbers fit
_TIME_WIDTH = len("59.9s")
_NOTEBOOK_WIDTH = 120
_NOTEBOOK_ROWS = 100  # as a notebook gets the whole table again after every epoch

Row = dict[str, str]  # cells by column, among them "epoch" and "time"


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
        self._lines = PrintProgressCallback()
        self._shows_table = False
        self._table: _RunTable | None = None  # while a training run is shown
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
        self._table = None
        if self._shows_table:
            self._table = _RunTable(trainer, self.metrics)
            trainer.current_run.end.messages.append(lambda: self._end(trainer))
        else:
            self._lines.on_training_run_start(trainer)

    def on_train_epoch_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        super().on_train_epoch_start(trainer)
        if self._table is None:
            self._lines.on_train_epoch_start(trainer)
        else:
            self._table.epoch_start = time.monotonic()

    def on_train_epoch_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        if self._table is None:
            super().on_train_epoch_end(trainer)
        else:
            self._table.finish_training(trainer)

    def log_metrics(self, trainer: TrainerLike, metrics: dict[str, Any]) -> None:
        """Show metrics as a row of the table, or as a line for an evaluation outside training."""
        if not self._shows_table:
            super().log_metrics(trainer, metrics)
        elif self._table is not None:
            self._table.add_row(trainer, metrics)
        else:
            taken = format_duration(time.monotonic() - self._evaluation_start)
            values = ", ".join(f"{name} {format_value(value) or value}" for name, value in metrics.items())
            trainer.print(wrapped(f"Evaluated in {taken}: {values}"))

    def on_exception(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._lines.on_exception(trainer)
        name = type(kwargs["exception"]).__name__
        self._end(trainer, "Interrupted" if name == "KeyboardInterrupt" else f"Failed ({name})")

    def on_training_run_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        if not self._shows_table:
            self._lines.on_training_run_end(trainer)
        super().on_training_run_end(trainer)

    def _end(self, trainer: TrainerLike, failure: str = "") -> None:
        ended, self._table = self._table, None
        if ended is not None:
            ended.end(trainer, failure)

    # ---------------------------------------------------------------------------------------- evaluation

    def on_evaluation_run_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        if self._table is not None:  # within a training run, metrics belong to the next row
            return
        super().on_evaluation_run_start(trainer)
        self._evaluation_start = time.monotonic()
        if trainer.current_run.outer is None:
            self._look_for_terminal()
        if not self._shows_table:
            self._lines.on_evaluation_run_start(trainer)

    def on_evaluation_run_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        if self._table is not None:
            return
        if not self._shows_table:
            self._lines.on_evaluation_run_end(trainer)
        super().on_evaluation_run_end(trainer)


class _RunTable:
    """The table of one training run. Adding a row takes the same time however many there are.

    :param chosen: names of the metrics that the user wants to see; ``None`` for any
    """

    def __init__(self, trainer: TrainerLike, chosen: list[str] | None) -> None:
        self._chosen = chosen
        self._expected = trainer.current_run.request.metrics
        self._key, self._greater = self._choose_key()
        self._marked = _title(self._key) if self._key else ""
        self._best: tuple[float, str] | None = None
        self._best_row: Row | None = None
        self._rows: list[Row] = []
        self._rates = shown_rates(trainer)
        self._columns = self._ranked(self._expected.directions)
        self._layout: dict[str, int] = {}
        self._epoch_width = len(f"step {max(find_length(trainer.train_dataloader) or 0, 100)}")
        self._start = self.epoch_start = time.monotonic()
        self._first_update = trainer.progress.update
        self._first_epoch = trainer.progress.epochs_completed + 1
        self._trained_epoch = 0
        self._before = {path: _changed(path) for path in trainer.current_run.request.paths}
        self._output: NotebookOutput | None = None
        if in_notebook() and trainer.accelerator.is_local_main_process:
            NotebookOutput.leave(trainer)
            self._output = NotebookOutput.of(trainer)
        if trainer.progress.epochs_completed:
            self._find_earlier_best(trainer)

    # ----------------------------------------------------------------------------------- what is shown

    def _choose_key(self) -> tuple[str | None, bool]:
        """Return the metric whose best value is marked, and whether larger values are better."""
        for watched in self._expected.watched:
            return watched.name, bool(watched.greater_is_better)
        losses = [name for name in self._expected.evaluated if re.search(r"(^|_)eval_loss_epoch$", name)]
        return min(losses, key=lambda name: name.startswith("ema_"), default=None), False

    def _find_earlier_best(self, trainer: TrainerLike) -> None:
        """Find the best value of the epochs before a resumed run."""
        history: Any = trainer.run_history
        offset = history.current_epoch - 1 - trainer.progress.epochs_completed
        for row in history.rows() if hasattr(history, "rows") else ():
            if row["epoch"] > offset:
                self._is_best(row, f"epoch {row['epoch'] - offset}")

    def _is_best(self, metrics: dict[str, Any], where: str) -> bool:
        """Return whether the value to be marked is the best so far, and remember it if so."""
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
            return list(dict.fromkeys([*map(_title, self._chosen), *self._rates]))
        evaluated = {_title(name) for name in self._expected.evaluated}
        declared = {_title(name) for name in self._expected.directions}

        def rank(title: str) -> int:
            if title.endswith(("train loss", "eval loss")):
                return 0 if title.endswith("train loss") else 1
            if title in self._rates:
                return 2
            return 3 if title in evaluated else 4 if title not in declared else 5

        titles = dict.fromkeys([*self._rates, *map(_title, names)])
        titles.pop("time", None)  # of an epoch, which the table has
        return sorted(titles, key=rank)

    def finish_training(self, trainer: TrainerLike) -> None:
        """Remember the learning rates at the end of the training part of an epoch."""
        self._trained_epoch = trainer.progress.epoch
        self._rates = shown_rates(trainer)

    def add_row(self, trainer: TrainerLike, metrics: dict[str, Any]) -> None:
        """Show new metrics of an epoch or of an evaluation within one."""
        progress = trainer.progress
        is_whole = self._trained_epoch == progress.epoch
        row = {"epoch": epoch_of(trainer) if is_whole else f"step {progress.step}"}
        row |= {_title(name): text for name, value in metrics.items() if (text := format_value(value))}
        for name, rate in (self._rates if is_whole else shown_rates(trainer)).items():
            row[name] = f"{metrics.get(name, rate):.2e}"  # a callback may have recorded the last update's rate
        row["time"] = format_duration(time.monotonic() - self.epoch_start)
        is_best = self._is_best(metrics, f"epoch {progress.epoch}" + ("" if is_whole else f", step {progress.step}"))
        if self._marked in row:
            row[self._marked] += "*" if is_best else " "
        self._best_row = row if is_best else self._best_row
        self._rows.append(row)
        shown = {*self._columns, *row}
        self._columns = [name for name in self._ranked([*self._expected.directions, *metrics]) if name in shown]
        if self._output is not None:
            self._update(self._output)
            return
        layout = self._fit(shutil.get_terminal_size().columns)
        head = [] if layout == self._layout else self._head(layout)
        self._layout = layout
        trainer.print("\n".join([*head, _line(row, layout)]))

    # ------------------------------------------------------------------------------------ how it is shown

    def _fit(self, width: int) -> dict[str, int]:
        """Return the widths of as many columns as fit, learning rates last."""
        chosen: dict[str, int] = {}
        room = width - self._epoch_width - len(_GAP) - _TIME_WIDTH
        for column in self._columns:
            needed = max(len(self._heading(column)), _MIN_WIDTH) + len(_GAP)
            if not chosen or needed <= room:
                chosen[column] = needed - len(_GAP)
                room -= needed
        rates_last = {column: chosen[column] for column in sorted(chosen, key=lambda name: name in self._rates)}
        return {"epoch": self._epoch_width, **rates_last, "time": _TIME_WIDTH}

    def _heading(self, column: str) -> str:
        return f"{column} " if column == self._marked else column

    def _note(self, layout: dict[str, int]) -> list[str]:
        count = len(set(self._columns) - layout.keys())
        return [f"({count} more metric{'s are' if count > 1 else ' is'} in trainer.run_history)"] if count else []

    def _head(self, layout: dict[str, int]) -> list[str]:
        line = _line({column: self._heading(column) for column in layout}, layout)
        return [*self._note(layout), line, "-" * len(line)]

    def _update(self, output: NotebookOutput, summary: Sequence[str] = ()) -> None:
        """Show the latest rows and the best in a notebook."""
        layout = self._fit(_NOTEBOOK_WIDTH)
        columns = list(layout)
        rows = self._rows[-_NOTEBOOK_ROWS:]
        notes = self._note(layout)
        if len(rows) < len(self._rows):
            notes.insert(
                0, f"(the last {len(rows)} of {len(self._rows):,} rows; all metrics are in trainer.run_history)"
            )
            if self._best_row is not None and all(row is not self._best_row for row in rows):
                rows.insert(0, self._best_row)
        bold = None
        if self._best_row in rows and self._marked in columns:
            bold = rows.index(self._best_row), columns.index(self._marked)
        cells = [[row.get(column, "").rstrip(" *") for column in columns] for row in rows]
        output.html = table("", cells, columns, [*notes, *summary], bold)
        output.text = "\n".join([*notes, *self._head(layout)[-2:], *(_line(row, layout) for row in rows), *summary])
        output.refresh()

    # ------------------------------------------------------------------------------------------- the end

    def end(self, trainer: TrainerLike, failure: str) -> None:
        """Show the summary, unless nothing was trained.

        :param failure: how the run ended, if with an error
        """
        if trainer.progress.update == self._first_update and not failure:
            return
        summary = self._summary(trainer, failure or _how_it_ended(trainer))
        files = list(self._written_files(trainer))
        if self._output is None:
            trainer.print("\n".join(["", wrapped(summary), *files]))
        else:
            self._output.bars.clear()
            self._update(self._output, [summary, *files])

    def _summary(self, trainer: TrainerLike, how: str) -> str:
        progress = trainer.progress
        taken = format_duration(time.monotonic() - self._start)
        if how == "Trained":
            first, last = self._first_epoch, progress.epochs_completed
            epochs = f"{last} epoch{'s' * (last > 1)}" if first == 1 else f"epochs {first} to {last}"
            summary = f"Trained {epochs}, {progress.update:,} updates, in {taken}."
        else:
            summary = f"{how} in epoch {progress.epoch}, after update {progress.update:,}, in {taken}."
        if self._best is not None:
            summary += f" Best: {self._best[1]}, {self._marked} {format_value(self._best[0])}."
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
    end = trainer.current_run.end
    if end.pause is not None:
        return "Interrupted" if isinstance(end.pause, RunInterruptedError) else "Paused"
    return "Trained" if end.reason is None else "Stopped"


def _changed(path: str) -> int | None:
    """Return the modification time of a file or directory in ns, or ``None`` if it does not exist."""
    return os.stat(path).st_mtime_ns if os.path.exists(path) else None


def _line(row: Row, layout: dict[str, int]) -> str:
    """Return a row as a line of text, the first cell aligned to the left."""
    cells = [f"{row.get(column, ''):>{width}}" for column, width in layout.items()]
    return _GAP.join([row["epoch"].ljust(layout["epoch"]), *cells[1:]])


def _title(name: str) -> str:
    """Return a metric's column title, which omits common suffixes; evaluations within epochs share the columns."""
    name = name.replace("intermediate_", "")
    loss = re.fullmatch(r"(.*_)?(train|eval)_(\w+?)(_epoch)?", name)
    if loss and (loss[4] or loss[2] == "eval"):
        return " ".join([*filter(None, [(loss[1] or "").rstrip("_")]), loss[2], loss[3]])
    return name.removesuffix("_epoch")
