"""Writing the metrics of a run to a JSON lines or CSV file."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytorch_accel_lite.base.protocols import TrainerLike
from pytorch_accel_lite.callbacks.step_logging import StepLogger
from pytorch_accel_lite.checkpoint.files import replacing
from pytorch_accel_lite.engine.history import InMemoryRunHistory, count_values

if TYPE_CHECKING:
    from pytorch_accel_lite.base.run_settings import RunRequest

Row = dict[str, Any]


class MetricsFileCallback(StepLogger):
    """Write the metrics of the run history to a file, one row per epoch, as JSON lines (``.jsonl``) or CSV (``.csv``).

    Each epoch appends its row in a single write, so a run that is killed leaves whole rows; a resumed run replaces the
    file atomically, so that it has each row once. A metric recorded several times in an epoch, such as by evaluations
    within it, shows its last value; a :class:`TrackerCallback` logs all of them. Non-finite numbers are written as the
    strings ``NaN``, ``Infinity`` and ``-Infinity``; values that are not numbers are written as strings.

    :param path: the file to write; missing directories are created. A run that is not resumed replaces the file.
    :param every_n_updates: also write a row every n updates to a second file, ``metrics_updates.jsonl`` next to
        ``metrics.jsonl``, with ``update``, ``epoch``, the mean ``loss`` since the previous row and the
        ``step_metrics`` of other callbacks
    :raises ValueError: for any other suffix; at the start of a run, if another callback writes to one of the files
    :raises OSError: at the start of a run, if the file cannot be written
    """

    def __init__(self, path: str | os.PathLike[str] = "metrics.jsonl", every_n_updates: int | None = None) -> None:
        super().__init__(every_n_updates)
        self.path = Path(path)
        if self.path.suffix not in (".jsonl", ".csv"):
            raise ValueError(f"path={os.fspath(path)!r} must end in .jsonl (JSON lines) or .csv.")
        self.updates_path = self.path.with_name(f"{self.path.stem}_updates{self.path.suffix}")
        self._columns: list[str] = []
        self._epochs = _EpochFile(self.path)
        self._trained = False

    def configure_run(self, trainer: TrainerLike, request: RunRequest, **kwargs: Any) -> None:
        if request.kind == "training":
            request.claim_path(self, "path", self.path, "metrics")
            if self.every_n_updates is not None:
                request.claim_path(self, "updates_path", self.updates_path, "metrics of updates")

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: Any) -> None:
        super().on_training_run_start(trainer)
        if not hasattr(trainer.run_history, "rows"):
            raise TypeError(
                "MetricsFileCallback needs a run history with rows(), which "
                f"{type(trainer.run_history).__name__} lacks. Derive it from InMemoryRunHistory."
            )
        self._trained = True
        trainer.ranks.run_together(lambda: self._begin_files(trainer), only_first=True)

    def _begin_files(self, trainer: TrainerLike) -> None:
        self._epochs.replace(trainer.run_history)
        if self.every_n_updates is not None:
            update = trainer.progress.update
            rows = [row for row in _read(self.updates_path) if int(row["update"]) <= update] if update else []
            self._columns = list(dict.fromkeys(name for row in rows for name in row))
            _replace(self.updates_path, rows)

    def write_row(self, update: int, epoch: int, values: dict[str, float]) -> None:
        row = {"update": update, "epoch": epoch, **values}
        if self.path.suffix == ".csv" and not row.keys() <= set(self._columns):
            self._columns = list(dict.fromkeys([*self._columns, *row]))
            _replace(self.updates_path, [*_read(self.updates_path), row], self._columns)
            return
        with self.updates_path.open("a") as file:
            file.write(_as_text([row], self.path.suffix, self._columns, header=False))

    def on_epoch_checkpoint(self, trainer: TrainerLike, **kwargs: Any) -> None:
        self._update(trainer)

    def on_training_run_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        super().on_training_run_end(trainer)
        self._update(trainer)

    def on_evaluation_run_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        if self._trained:  # otherwise an existing file belongs to another program's run
            self._update(trainer, is_later=trainer.current_run.outer is None)

    def _update(self, trainer: TrainerLike, is_later: bool = False) -> None:
        """Write what is new in the history, or all of it after an evaluation later than the run."""
        if trainer.accelerator.is_main_process:
            (self._epochs.replace if is_later else self._epochs.update)(trainer.run_history)


class _EpochFile:
    """A file with a row for each epoch of a history. Updates take the same time however many rows there are."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._columns: list[str] = []
        self._counts: dict[str, int] = {}  # of values in the history, by metric
        self._epoch = 0  # of the last row, which may still change
        self._begin = self._end = 0  # offsets in bytes of the last row

    def replace(self, history: Any) -> None:
        """Write all rows to a new file, which replaces the old one atomically."""
        rows = history.rows()
        self._columns = list(dict.fromkeys(name for row in rows for name in row))
        self._counts = count_values(history)
        _replace(self._path, rows, self._columns)
        self._epoch = rows[-1]["epoch"] if rows else 0
        self._end = self._path.stat().st_size
        self._begin = self._end - len(self._encode(rows[-1:]))

    def update(self, history: Any) -> None:
        """Write the last row again and those after it, in a single write, if the rows before it are as they were."""
        counts = count_values(history)
        rows = _rows_from(history, self._epoch)
        shrank = any(count > counts.get(name, 0) for name, count in self._counts.items())
        if shrank or not self._holds(rows):
            self.replace(history)
            return
        begin = self._begin if rows and rows[0]["epoch"] == self._epoch else self._end
        text = self._encode(rows)
        if begin + len(text) < self._end or not self._path.is_file() or self._path.stat().st_size != self._end:
            self.replace(history)  # the rest of a longer row must not remain; someone else has changed the file
            return
        self._counts = counts
        if not rows:
            return
        with self._path.open("r+b") as file:
            file.seek(begin)
            file.write(text)
        self._epoch = rows[-1]["epoch"]
        self._end = begin + len(text)
        self._begin = self._end - len(self._encode(rows[-1:]))

    def _holds(self, rows: list[Row]) -> bool:
        """Whether the columns of the file are those of these rows, too."""
        return self._path.suffix != ".csv" or all(row.keys() <= set(self._columns) for row in rows)

    def _encode(self, rows: list[Row]) -> bytes:
        return _as_text(rows, self._path.suffix, self._columns, header=False).encode()


def _rows_from(history: Any, epoch: int) -> list[Row]:
    """Return the rows of a history from an epoch on."""
    if type(history).rows is InMemoryRunHistory.rows:
        return history.rows(epoch)  # type: ignore[no-any-return]
    return [row for row in history.rows() if row["epoch"] >= epoch]


def plain(value: Any) -> Any:
    """Return a value in the form in which it is written."""
    if isinstance(value, (str, bool, int)) or value is None:
        return value
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        return str(value)
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def _as_text(rows: Iterable[Row], suffix: str, columns: list[str], header: bool) -> str:
    written = [{name: plain(value) for name, value in row.items()} for row in rows]
    if suffix == ".jsonl":
        return "".join(json.dumps(row) + "\n" for row in written)
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows(written)
    return text.getvalue()


def _replace(path: Path, rows: list[Row], columns: list[str] | None = None) -> None:
    """Replace a file atomically with one that has these rows."""
    columns = columns or list(dict.fromkeys(name for row in rows for name in row))
    with replacing(path) as temporary:
        temporary.write_bytes(_as_text(rows, path.suffix, columns, header=bool(columns)).encode())


def _read(path: Path) -> list[Row]:
    """Read the complete rows of a file, whose last row may be partial."""
    if not path.is_file():
        return []
    text = path.read_text()
    lines = text[: text.rfind("\n") + 1].splitlines()
    if path.suffix == ".csv":
        return [dict(row) for row in csv.DictReader(lines)]
    return [json.loads(line) for line in lines]
