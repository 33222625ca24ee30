"""Writing the metrics of a run to a JSON lines or CSV file."""

from __future__ import annotations

import csv
import io
import json
import os
from pathlib import Path

from pytorch_accel_lite.checkpoint import file_path, no_link, write_text
from pytorch_accel_lite.extending import RunRequest, TrainerLike
from pytorch_accel_lite.extension_tools.metrics_and_callbacks import Interval, MetricValue
from pytorch_accel_lite.extension_tools.texts_and_pages import as_plain
from pytorch_accel_lite.extensions.step_logging import StepLogger
from pytorch_accel_lite.tracking import RunHistory
from pytorch_accel_lite.utils import as_cell, from_cell

Row = dict[str, MetricValue]


class MetricsFileCallback(StepLogger):
    """Write the metrics of the run history to a file, one row per epoch, as JSON lines (``.jsonl``) or CSV (``.csv``).

    Each epoch appends its row in a single write, so a killed run leaves whole rows; a resumed run replaces the file
    atomically, so that it has each row once. If a metric is recorded several times in an epoch, such as by evaluations
    within it, its row has the last value; a ``TrackerCallback`` logs all values. Non-finite numbers are written as the
    strings ``NaN``, ``Infinity`` and ``-Infinity``; values that are not numbers are written as strings. In CSV, names
    and texts that a spreadsheet would take for formulas are prefixed with a quote.

    Args:
        path: the file to write; missing directories are created. A run that is not resumed replaces the file.
        every_n_updates: also write a row every n updates to a second file, ``metrics_updates.jsonl`` next to
            ``metrics.jsonl``, with ``update``, ``epoch``, the mean ``loss`` since the previous row and the
            ``step_metrics`` of other callbacks
        every: instead, write these rows at an ``Interval``, such as ``"10_000 samples"``

    Attributes:
        updates_path: the file of the rows every n updates

    Raises:
        ValueError: for any other suffix; at the start of a run, if another callback writes to one of the files
        OSError: at the start of a run, if the file cannot be written
    """

    def __init__(
        self,
        path: str | os.PathLike[str] = "metrics.jsonl",
        every_n_updates: int | None = None,
        *,
        every: str | Interval | None = None,
    ) -> None:
        super().__init__(every_n_updates, every)
        self.path = file_path("path", path)
        if self.path.suffix not in (".jsonl", ".csv"):
            raise ValueError(f"path={os.fspath(path)!r} must end in .jsonl (JSON lines) or .csv.")
        self.updates_path = self.path.with_name(f"{self.path.stem}_updates{self.path.suffix}")
        self._epochs = _RowFile(self.path)
        self._updates = _RowFile(self.updates_path)
        self._has_trained = False

    def configure_run(self, trainer: TrainerLike, request: RunRequest, **kwargs: object) -> None:
        request.claim_path(self, "path", self.path, "metrics")
        if self.every is not None:
            request.claim_path(self, "updates_path", self.updates_path, "metrics of updates")

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        super().on_training_run_start(trainer)
        if type(trainer.run_history).rows is RunHistory.rows:
            raise TypeError(
                "MetricsFileCallback needs a run history with rows(), which "
                f"{type(trainer.run_history).__name__} lacks. Derive it from InMemoryRunHistory."
            )
        self._has_trained = True
        trainer.ranks.run_together(lambda: self._begin_files(trainer), only_first=True)

    def _begin_files(self, trainer: TrainerLike) -> None:
        self._epochs.replace(trainer.run_history.rows())
        if self.every is not None:
            update = trainer.progress.update
            rows = [row for row in self._updates.read() if int(row["update"]) <= update] if update else []
            self._updates.replace(rows)

    def write_row(self, update: int, epoch: int, values: dict[str, float]) -> None:
        if int(self._updates.last_row.get("update", 0)) != update:  # a killed run may have written this row already
            self._updates.append([{"update": update, "epoch": epoch, **values}])

    def on_training_run_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        super().on_training_run_end(trainer)
        if trainer.accelerator.is_main_process and self._has_trained:
            self._epochs.replace(trainer.run_history.rows())

    def on_evaluation_run_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        if self._has_trained:  # otherwise an existing file belongs to another program's run
            self._update(trainer)

    def _update(self, trainer: TrainerLike, **kwargs: object) -> None:
        """Append the rows of new epochs, or replace the file if a row in it has changed."""
        if not trainer.accelerator.is_main_process:
            return
        last_row = self._epochs.last_row
        rows = trainer.run_history.rows(last_row.get("epoch", 0))
        if rows and last_row and _is_same(rows[0], last_row):
            self._epochs.append(rows[1:])
        else:
            self._epochs.replace(trainer.run_history.rows())

    on_epoch_checkpoint = _update


class _RowFile:
    """A file of rows, as JSON lines or CSV by its suffix.

    Args:
        path: the path of the file

    Attributes:
        last_row: the row written last
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._columns: list[str] = []
        self.last_row: Row = {}

    def replace(self, rows: list[Row]) -> None:
        """Replace the file atomically with one of these rows."""
        self._columns = list(dict.fromkeys(_as_read(name) for row in rows for name in row))
        write_text(self._path, self._as_text(rows, header=bool(rows)))
        self.last_row = rows[-1] if rows else {}

    def append(self, rows: list[Row]) -> None:
        """Append rows in a single write, unless they need new columns."""
        if not rows:
            return
        if self._path.suffix == ".csv" and any(not {*map(_as_read, row)} <= {*self._columns} for row in rows):
            self.replace([*self.read(), *rows])
            return
        with open(self._path, "a", encoding="utf-8", errors="backslashreplace", opener=no_link) as file:
            file.write(self._as_text(rows))
        self.last_row = rows[-1]

    def read(self) -> list[Row]:
        """Read the complete rows of the file. Its last row may be partial."""
        if not self._path.is_file():
            return []
        text = self._path.read_bytes().decode("utf-8", errors="replace")
        complete = io.StringIO(text[: text.rfind("\n") + 1], newline="")  # a cell may have line breaks
        if self._path.suffix == ".jsonl":
            return [json.loads(line) for line in complete]
        return [{from_cell(name): from_cell(text) for name, text in row.items()} for row in csv.DictReader(complete)]

    def _as_text(self, rows: list[Row], header: bool = False) -> str:
        rows = [{name: as_plain(value) for name, value in row.items()} for row in rows]
        if self._path.suffix == ".jsonl":
            return "".join(json.dumps(row) + "\n" for row in rows)
        rows = [{_as_read(name): value for name, value in row.items()} for row in rows]
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        if header:
            writer.writerow(map(as_cell, self._columns))
        writer.writerows([as_cell(row.get(name, "")) for name in self._columns] for row in rows)
        return text.getvalue()


def _as_read(name: str) -> str:
    """Return a metric's name as it is read from a CSV file, where a line break is escaped."""
    return str(from_cell(as_cell(name)))


def _is_same(row: Row, other: Row) -> bool:
    """Whether two rows hold the same objects. Some may not be comparable."""
    return row.keys() == other.keys() and all(value is other[name] for name, value in row.items() if name != "epoch")
