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

from pytorch_accel_lite.callbacks.step_logging import StepLogger
from pytorch_accel_lite.checkpoint.files import replacing

if TYPE_CHECKING:
    from pytorch_accel_lite.run_config import RunRequest
    from pytorch_accel_lite.trainer import Trainer

Row = dict[str, Any]


class MetricsFileCallback(StepLogger):
    """Write the metrics of the run history to a file, one row per epoch, as JSON lines (``.jsonl``) or CSV (``.csv``).

    The file is replaced atomically after each epoch, so a crash never leaves a partial file, and a resumed run has each
    row once. A metric recorded several times in an epoch, such as by evaluations within it, shows its last value; a
    :class:`TrackerCallback` logs all of them. Non-finite numbers are written as the strings ``NaN``, ``Infinity`` and
    ``-Infinity``; values that are not numbers are written as strings.

    :param path: the file to write; missing directories are created. A run that is not resumed replaces the file.
    :param every_n_updates: also write a row every n updates to a second file, ``metrics_updates.jsonl`` next to
        ``metrics.jsonl``, with ``update``, ``epoch``, the mean ``loss`` since the previous row and the
        ``step_metrics`` of other callbacks
    :raises ValueError: for any other suffix
    :raises OSError: at the start of a run, if the file cannot be written
    """

    def __init__(self, path: str | os.PathLike[str] = "metrics.jsonl", every_n_updates: int | None = None) -> None:
        super().__init__(every_n_updates)
        self.path = Path(path)
        if self.path.suffix not in (".jsonl", ".csv"):
            raise ValueError(f"path={os.fspath(path)!r} must end in .jsonl (JSON lines) or .csv.")
        self.updates_path = self.path.with_name(f"{self.path.stem}_updates{self.path.suffix}")
        self._columns: list[str] = []
        self._trained = False

    def configure_run(self, trainer: Trainer, request: RunRequest, **kwargs: Any) -> None:
        if request.kind == "training":
            request.claim_path(self, "path", self.path, "metrics")

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        super().on_training_run_start(trainer)
        if not hasattr(trainer.run_history, "rows"):
            raise TypeError(
                "MetricsFileCallback needs a run history with rows(), which "
                f"{type(trainer.run_history).__name__} lacks. Derive it from InMemoryRunHistory."
            )
        self._trained = True
        trainer.ranks.run_together(lambda: self._begin_files(trainer), only_first=True)

    def _begin_files(self, trainer: Trainer) -> None:
        self._write_epochs(trainer)
        if self.every_n_updates is not None:
            update = trainer.progress.update
            rows = [row for row in _read(self.updates_path) if int(row["update"]) <= update] if update else []
            self._columns = list(dict.fromkeys(name for row in rows for name in row))
            _replace(self.updates_path, rows)

    def _write_epochs(self, trainer: Trainer) -> None:
        _replace(self.path, trainer.run_history.rows())  # type: ignore[attr-defined]

    def write_row(self, update: int, epoch: int, values: dict[str, float]) -> None:
        row = {"update": update, "epoch": epoch, **values}
        if self.path.suffix == ".csv" and not row.keys() <= set(self._columns):
            self._columns = list(dict.fromkeys([*self._columns, *row]))
            _replace(self.updates_path, [*_read(self.updates_path), row], self._columns)
            return
        with self.updates_path.open("a") as file:
            file.write(_as_text([row], self.path.suffix, self._columns, header=False))

    def on_epoch_checkpoint(self, trainer: Trainer, **kwargs: Any) -> None:
        self._update(trainer)

    def on_training_run_end(self, trainer: Trainer, **kwargs: Any) -> None:
        super().on_training_run_end(trainer)
        self._update(trainer)

    def on_evaluation_run_end(self, trainer: Trainer, **kwargs: Any) -> None:
        if self._trained:  # otherwise an existing file belongs to another program's run
            self._update(trainer)

    def _update(self, trainer: Trainer) -> None:
        if trainer.accelerator.is_main_process:
            self._write_epochs(trainer)


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
        temporary.write_text(_as_text(rows, path.suffix, columns, header=bool(columns)))


def _read(path: Path) -> list[Row]:
    """Read the complete rows of a file, whose last row may be partial."""
    if not path.is_file():
        return []
    text = path.read_text()
    lines = text[: text.rfind("\n") + 1].splitlines()
    if path.suffix == ".csv":
        return [dict(row) for row in csv.DictReader(lines)]
    return [json.loads(line) for line in lines]
