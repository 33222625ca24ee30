"""Reading the metrics, settings and outcomes of runs from their folders."""

from __future__ import annotations

import csv
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from pytorch_accel_lite import callbacks
from pytorch_accel_lite.extensions.experiment.results import Row
from pytorch_accel_lite.extensions.experiment.yaml_files import DIRECTIONS, RESOLVED, SETTING_RATES, flat
from pytorch_accel_lite.utils import from_cell

_SHIPPED_CALLBACKS = {name: getattr(callbacks, name) for name in callbacks.__all__ if name.endswith("Callback")}
_OBSERVERS = "|".join(name for name, kind in _SHIPPED_CALLBACKS.items() if not kind.affects_training)
#: Settings that are not compared: where a run wrote or what it resumed from, and values derived from other settings.
_IGNORED_SETTINGS = re.compile(
    r"output_dir|train\.resume_from|is_(distributed|local_process_zero|world_process_zero)|num_processes"
    r"|(num_local|num)_update_steps_per_epoch|(train|eval)_total_batch_size|eval_per_device_batch_size"
    rf"|(train|eval)_dl_kwargs(\..*)?|callbacks\.({_OBSERVERS})(#\d+)?(\..*)?"
)


def folders_of(base: Path) -> dict[int, Path]:
    """Return the folders of the runs with the same ``output_dir`` by number: ``sine``, ``sine-run2``, and so on."""
    pattern = re.compile(rf"{re.escape(base.name)}(?:-run(\d+))?")
    matches = [(pattern.fullmatch(path.name), path) for path in base.parent.glob("*")]
    return dict(sorted((int(m[1] or 1), path) for m, path in matches if m and (path / RESOLVED).is_file()))


def new_folder(base: Path, text: str) -> Path:
    """Create and return the folder of the next run with an ``output_dir``. No other run can claim the same folder.

    Args:
        text: the resolved experiment, which is written into the folder
    """
    number = max(folders_of(base), default=0)
    while True:
        number += 1
        folder = base if number == 1 else base.with_name(f"{base.name}-run{number}")
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError), open(folder / RESOLVED, "x") as file:
            file.write(text)
            return folder


class NoRunsError(ValueError):
    """There are no runs in the folders given."""


@dataclass(eq=False, repr=False)
class RecordedRun:
    """The records of a run.

    Args:
        folder: its folder
        rows: the metrics of each epoch, with ``epoch``
        settings: its configuration by key, such as ``optimizer.lr``
        source: the file that the settings come from; ``experiment.yaml`` and ``run.json`` have different keys
        directions: whether greater values are better, by metric name, for metrics of which this is known
        outcome: how the run ended, if that was recorded
        name: its folder, relative to the common parent of all compared runs
    """

    folder: Path
    rows: list[Row]
    settings: dict[str, Any] = field(default_factory=dict)
    source: str = ""
    directions: dict[str, bool] = field(default_factory=dict)
    outcome: str = ""
    name: str = ""

    @property
    def has_unused_rate(self) -> bool:
        """Whether the optimizer has a learning rate that the scheduler replaces."""
        scheduler = str(self.settings.get("scheduler")).rpartition(".")[2]
        return scheduler in SETTING_RATES and "optimizer.lr" in self.settings

    @property
    def effective_settings(self) -> dict[str, Any]:
        """The settings without a learning rate that has no effect."""
        unused = "optimizer.lr" if self.has_unused_rate else None
        return {key: value for key, value in self.settings.items() if key != unused}

    @property
    def metrics(self) -> dict[str, tuple[list[int], list[float]]]:
        """The epochs and values of each metric that is a number, by name."""
        metrics: dict[str, tuple[list[int], list[float]]] = {}
        for row in self.rows:
            for name, value in row.items():
                if name != "epoch" and isinstance(value, float):
                    epochs, values = metrics.setdefault(name, ([], []))
                    epochs.append(int(row["epoch"]))
                    values.append(value)
        return metrics


def find_runs(paths: Iterable[str | os.PathLike[str]]) -> tuple[list[RecordedRun], list[str]]:
    """Return the runs in folders, and the folders that contain no runs.

    Args:
        paths: folders of runs, or folders that contain some

    Raises:
        FileNotFoundError: if a path does not exist
        ValueError: if there are no runs, or a file cannot be read
    """
    by_path = {path: _runs_at(path) for path in map(Path, paths)}
    runs = {run.folder.resolve(): run for runs_in_path in by_path.values() for run in runs_in_path}
    left_out = [os.fspath(path) for path, runs_in_path in by_path.items() if not runs_in_path and path.is_dir()]
    if not runs:
        raise NoRunsError(
            f"No runs found in {', '.join(map(str, by_path)) or 'an empty list'}: there are no metrics. They are in "
            "the metrics.jsonl or metrics.csv of a MetricsFileCallback, which runs from files have by default, or in "
            "the run.json of a RunLogCallback, once an epoch has been completed."
        )
    root = os.path.commonpath([folder.parent for folder in runs])
    for folder, run in runs.items():
        run.name = os.path.relpath(folder, root)
    return list(runs.values()), left_out


def natural_order(text: object) -> list[Any]:
    """Return the key that sorts ``run-2`` before ``run-10``."""
    parts = re.split(r"(\d+)", str(text))
    return [int(part) if part.isdigit() else part for part in parts]


def _runs_at(path: Path) -> list[RecordedRun]:
    """Return the run in a folder, or else the runs in its subfolders."""
    if not path.exists():
        raise FileNotFoundError(f"There is no {os.fspath(path)!r}.")
    if (run := _run_in(path)) is not None:
        return [run]
    children = sorted(path.iterdir(), key=natural_order) if path.is_dir() else []
    runs = [_run_in(child) for child in children if child.is_dir() and not child.name.startswith(".")]
    return [run for run in runs if run is not None]


def _run_in(folder: Path) -> RecordedRun | None:
    """Return the run whose metrics are in a folder; ``None`` if it has no metrics."""
    record = _read_record(folder)
    rows: list[Row] = []
    for path in (folder / "metrics.jsonl", folder / "metrics.csv"):
        rows = rows or (_read_rows(path) if path.is_file() else [])
    rows = rows or _with_epochs(folder, [_as_numbers(row) for row in record.get("metrics") or []])
    if not rows:
        return None
    experiment = _parsed(folder / RESOLVED, yaml.safe_load, "YAML")
    return RecordedRun(
        folder,
        rows,
        settings=settings_of_run(experiment, record),
        source=RESOLVED if experiment else "run.json" if record else "",
        directions=_parsed(folder / DIRECTIONS, json.loads, "JSON") | (record.get("directions") or {}),
        outcome=str((record.get("attempts") or [{}])[-1].get("outcome", "")).partition(":")[0],
    )


def _read_rows(path: Path) -> list[Row]:
    try:
        lines = path.read_text().splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text: {error}. Restore it from a copy, or remove it.") from error
    if path.suffix == ".csv":
        table = csv.DictReader(lines, restkey="")
        cells = ({from_cell(name): from_cell(text) for name, text in row.items() if name} for row in table)
        return _with_epochs(path, [_as_numbers(row) for row in cells])
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(_as_numbers(json.loads(line)))
        except (ValueError, AttributeError) as error:
            raise ValueError(f"{path}, line {number} is no row of metrics in JSON: {error}.") from error
    return _with_epochs(path, rows)


def _with_epochs(path: Path, rows: list[Row]) -> list[Row]:
    """Return the rows that have the number of an epoch.

    Raises:
        ValueError: if that of a row is no number; names the file
    """
    rows = [row for row in rows if "epoch" in row]
    for row in rows:
        if not isinstance(row["epoch"], float) or not math.isfinite(row["epoch"]):
            raise ValueError(f"{path} is damaged, or has no metrics: the epoch of a row is {row['epoch']!r}.")
    return rows


def _as_numbers(row: Mapping[str, Any]) -> Row:
    """Return a row without empty cells, in which every text that is a number, or a boolean of a CSV, is a float."""
    numbers: Row = {}
    for name, value in row.items():
        try:
            numbers[name] = float({"True": 1, "False": 0}.get(value, value))
        except (TypeError, ValueError):
            if value not in ("", None):
                numbers[name] = value
    return numbers


def _read_record(folder: Path) -> dict[str, Any]:
    """Return the contents of the ``run.json`` of a folder, which may be in a subfolder."""
    for path in (folder / "run.json", *sorted(folder.glob("*log/run.json"))):
        if path.is_file():
            record = _parsed(path, json.loads, "JSON")
            _check_record(path, record)
            return record
    return {}


def _check_record(path: Path, record: Mapping[str, Any]) -> None:
    """Check the entries of a ``run.json`` that are used.

    Raises:
        ValueError: if an entry has the wrong type; names the file and the entry
    """
    kinds = {"metrics": list, "attempts": list, "config": dict, "directions": dict, "versions": dict, "git": dict}
    for name, kind in kinds.items():
        value = record.get(name)
        rows = value if kind is list and isinstance(value, list) else []
        if not isinstance(value, (kind, type(None))) or not all(isinstance(row, dict) for row in rows):
            raise ValueError(f"{path} is not the record of a run: {name!r} in it is {str(value)[:60]!r}.")


def _parsed(path: Path, parse: Callable[[str], Any], kind: str) -> dict[str, Any]:
    """Return the contents of a file; an empty dict if it does not exist."""
    try:
        content = (path.is_file() and parse(path.read_text())) or {}
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path} is not {kind}: {error}.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} should hold names and values, but holds {str(content)[:60]!r}.")
    return content


# ----------------------------------------------------------------------------------------------------- settings


def settings_of_run(experiment: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run by key.

    Args:
        experiment: contents of its ``experiment.yaml``, if it has one
        record: contents of its ``run.json``, if it has one
    """
    config = {name: record[name] for name in ("model", "loss", "optimizer", "schedule") if name in record}
    config |= record.get("config") or {}
    epochs, updates = (config.get(name) or 0 for name in ("num_epochs", "num_update_steps_per_epoch"))
    if config.get("max_num_train_steps") == epochs * updates:  # the number of steps follows from the number of epochs
        del config["max_num_train_steps"]
    settings = dict(flat(experiment or config))
    settings |= {name: record[name] for name in ("processes", "device") if name in record}
    git = record.get("git") or {}
    if "commit" in git:
        settings["git commit"] = git["commit"][:10] + (", with changes" if git.get("has_changes") else "")
    versions = (record.get("versions") or {}).items()
    settings |= {f"version of {name}": str(number).partition("+")[0] for name, number in versions}
    return {key: value for key, value in settings.items() if not _IGNORED_SETTINGS.fullmatch(key)}
