"""Reading what runs have left in their folders: metrics, settings, how they ended."""

from __future__ import annotations

import csv
import glob
import json
import os
import pydoc
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from pytorch_accel_lite.experiment.results import Row, text_table
from pytorch_accel_lite.experiment.yaml_files import RESOLVED, flat

_SUFFIXES = (".jsonl", ".csv")
#: Callbacks that only observe a run: what they print, draw and write does not change it.
_OBSERVERS = (
    "Advice|DeviceMemory|GradientNorm|HangWatch|LearningRateMonitor|LogMetrics|LossScale|MetricsFile|ModelSummary"
    "|NaNReport|PlotMetrics|PredictionWriter|PrintProgress|Profiler|ProgressBar|ProgressTable|RunLog|SaveTrainingState"
    "|Snapshot|Throughput|Timing|Tracker|WorstSamples"
)
#: Settings that say where a run wrote or what it resumed from, or that follow from others.
_BESIDE_THE_POINT = re.compile(
    r"output_dir|train\.resume_from|is_(distributed|local_process_zero|world_process_zero)|num_processes"
    r"|(num_local|num)_update_steps_per_epoch|(train|eval)_total_batch_size|eval_per_device_batch_size"
    rf"|(train|eval)_dl_kwargs(\..*)?|callbacks\.({_OBSERVERS})Callback(#\d+)?(\..*)?"
)


def folders_of(base: Path) -> dict[int, Path]:
    """Return the folders of the runs with the same ``output_dir`` by number: ``wave``, ``wave-run2``, and so on."""
    pattern = re.compile(rf"{re.escape(base.name)}(?:-run(\d+))?")
    matches = [(pattern.fullmatch(path.name), path) for path in base.parent.glob("*")]
    return dict(sorted((int(m[1] or 1), path) for m, path in matches if m and (path / RESOLVED).is_file()))


def new_folder(base: Path, text: str) -> Path:
    """Return the folder of the next run with an ``output_dir``, which no other run can have any more.

    :param text: the resolved experiment, which is written there
    """
    for number in count(max(folders_of(base), default=0) + 1):
        folder = base if number == 1 else base.with_name(f"{base.name}-run{number}")
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError), open(folder / RESOLVED, "x") as file:
            file.write(text)
            return folder
    raise AssertionError  # numbers do not end


@dataclass
class RecordedRun:
    """What a run has left behind.

    :param folder: its folder
    :param rows: the metrics of each epoch, with ``epoch``
    :param settings: its configuration, by key, such as ``optimizer.lr``
    :param source: the file that the configuration is from; those of different kinds have different keys
    :param directions: whether greater values are better, as far as known, by metric name
    :param outcome: how it ended, if it kept a record of that
    :param name: its folder, or the file with its metrics, relative to what all runs that are compared have in common
    """

    folder: Path
    rows: list[Row]
    settings: dict[str, Any] = field(default_factory=dict)
    source: str = ""
    directions: dict[str, bool] = field(default_factory=dict)
    outcome: str = ""
    name: str = ""

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


def describe_states(folder: Path) -> str:
    """Return a table of the training states in a folder, or in the runs in it, in the order of time."""
    rows = []
    for depth in ("*", "*/*", "*/*/*"):
        for path in folder.glob(f"{depth}/manifest.json"):
            manifest = _parsed(path, json.loads, "JSON")
            progress, saved = manifest["progress"], datetime.fromtimestamp(manifest["saved_at"])
            rows.append((saved, [os.fspath(path.parent), str(progress["epoch"]), f"{progress['update']:,}"]))
    cells = [[*row, saved.isoformat(" ", "minutes")] for saved, row in sorted(rows)]
    columns = zip(["training state", "epoch", "update", "saved"], *cells, strict=True)
    return "\n".join(text_table([*columns])) if rows else ""


def find_runs(paths: Iterable[str | os.PathLike[str]]) -> tuple[list[RecordedRun], list[str]]:
    """Return the runs in folders, and the folders that have none.

    :param paths: folders of runs, folders that contain some, files with metrics, or patterns such as ``runs/*``
    :raises FileNotFoundError: if a path does not exist
    :raises ValueError: if there is no run, or a file cannot be read
    """
    patterns = [os.fspath(path) for path in paths]
    by_path = {path: _runs_at(path) for path in _expanded(patterns)}
    runs = {location.resolve(): run for in_path in by_path.values() for location, run in in_path.items()}
    left_out = [os.fspath(path) for path, in_path in by_path.items() if not in_path and path.is_dir()]
    if not runs:
        raise ValueError(
            f"No runs found in {', '.join(patterns)}: there are no metrics. They are in the metrics.jsonl or "
            "metrics.csv of a MetricsFileCallback, which runs from files have by default, or in the run.json of a "
            "RunLogCallback, once an epoch has been completed."
        )
    above = os.path.commonpath([location.parent for location in runs])
    for location, run in runs.items():
        run.name = os.path.relpath(location, above)
    return list(runs.values()), left_out


def _expanded(given: Sequence[str]) -> Iterator[Path]:
    for text in given:
        matches = [text] if Path(text).exists() else sorted(glob.glob(text), key=natural_order)
        if not matches:
            raise FileNotFoundError(f"There is no {text!r}.")
        yield from map(Path, matches)


def natural_order(text: object) -> list[Any]:
    """Return the key that sorts ``run-2`` before ``run-10``."""
    parts = re.split(r"(\d+)", str(text))
    return [int(part) if part.isdigit() else part for part in parts]


def _runs_at(path: Path) -> dict[Path, RecordedRun]:
    """Return the run with a file of metrics; the runs in a folder; or else those in its subfolders."""
    if path.is_file():
        rows = _read_rows(path) if path.suffix in _SUFFIXES else []
        return {path: _read_run(path.parent, rows)} if rows else {}
    runs = _runs_in(path)
    if not runs:
        for child in sorted(path.iterdir(), key=natural_order):
            if child.is_dir() and not child.name.startswith("."):
                runs |= _runs_in(child)
    return runs


def _runs_in(folder: Path) -> dict[Path, RecordedRun]:
    """Return the run that a folder is of; or else one for each file of metrics in it."""
    for suffix in _SUFFIXES:
        path = folder / f"metrics{suffix}"
        if path.is_file() and (rows := _read_rows(path)):
            return {folder: _read_run(folder, rows)}
    if rows := [_as_numbers(row) for row in _read_record(folder).get("metrics") or []]:
        return {folder: _read_run(folder, rows)}
    others: dict[str, Path] = {}
    for suffix in _SUFFIXES:
        others |= {path.stem: path for path in sorted(folder.glob(f"*{suffix}")) if path.stem not in others}
    by_path = {path: _read_rows(path) for path in others.values() if _is_of_epochs(path)}
    return {path: _read_run(folder, rows) for path, rows in by_path.items() if rows}


def _is_of_epochs(path: Path) -> bool:
    """Whether the first row of a file is that of an epoch; the file may be of any other kind."""
    with path.open(errors="replace") as file:
        names = re.findall(r'"([^"]*)":' if path.suffix == ".jsonl" else r'[^",\n]+', file.readline())
    return "epoch" in names and names[0] != "update"


# ------------------------------------------------------------------------------------------------------ one run


def _read_run(folder: Path, rows: list[Row]) -> RecordedRun:
    """Return the run in a folder that has these metrics."""
    record = _read_record(folder)
    experiment = _parsed(folder / RESOLVED, yaml.safe_load, "YAML")
    directions = [*_directions_in(experiment), *record.get("directions", {}).items()]
    return RecordedRun(
        folder,
        rows,
        settings=_settings_of(experiment, record),
        source=RESOLVED if experiment else "run.json" if record else "",
        directions={name: direction for name, direction in directions if direction is not None},
        outcome=str(record.get("attempts", [{"outcome": ""}])[-1]["outcome"]).partition(":")[0],
    )


def _read_rows(path: Path) -> list[Row]:
    lines = path.read_text().splitlines()
    if path.suffix == ".csv":
        return [_as_numbers(row) for row in csv.DictReader(lines)]
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(_as_numbers(json.loads(line)))
        except (ValueError, AttributeError) as error:
            raise ValueError(f"{path}, line {number} is no row of metrics in JSON: {error}.") from error
    return [row for row in rows if "epoch" in row]


def _as_numbers(row: Mapping[str, Any]) -> Row:
    """Return a row with floats in place of all that can be read as such, and without empty cells."""
    numbers: Row = {}
    for name, value in row.items():
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError):
            if value not in ("", None):
                numbers[name] = value
    return numbers


def _read_record(folder: Path) -> dict[str, Any]:
    """Return the contents of the ``run.json`` of a folder, which may be in a folder of its own in it."""
    for path in (folder / "run.json", *sorted(folder.glob("*/run.json"))):
        if path.is_file():
            return _parsed(path, json.loads, "JSON")
    return {}


def _parsed(path: Path, parse: Callable[[str], Any], kind: str) -> dict[str, Any]:
    """Return the contents of a file, which is empty if there is none."""
    try:
        return (path.is_file() and parse(path.read_text())) or {}
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path} is not {kind}: {error}.") from error


# ----------------------------------------------------------------------------------------------------- settings


def _settings_of(experiment: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run by key.

    :param experiment: contents of its ``experiment.yaml``, if it has one
    :param record: contents of its ``run.json``, if it has one
    """
    config = {name: record[name] for name in ("model", "loss", "optimizer", "schedule") if name in record}
    config |= record.get("config", {})
    epochs, updates = (config.get(name) or 0 for name in ("num_epochs", "num_update_steps_per_epoch"))
    if config.get("max_num_train_steps") == epochs * updates:  # it follows from the number of epochs
        del config["max_num_train_steps"]
    settings = dict(flat(experiment or config))
    settings |= {name: record[name] for name in ("processes", "device") if name in record}
    git = record.get("git") or {}
    if "commit" in git:
        settings["git commit"] = git["commit"][:10] + (", with changes" if git.get("has_changes") else "")
    versions = record.get("versions", {}).items()
    settings |= {f"version of {name}": str(number).partition("+")[0] for name, number in versions}
    return {key: value for key, value in settings.items() if not _BESIDE_THE_POINT.fullmatch(key)}


def _directions_in(content: Any) -> Iterator[tuple[str, bool | None]]:
    """Yield whether greater values are better of the metrics that an experiment names, as far as it tells."""
    if isinstance(content, list):
        content = dict(enumerate(content))
    if not isinstance(content, Mapping):
        return
    for inner in content.values():
        yield from _directions_in(inner)
    metrics = content.get("metrics")
    for name, metric in metrics.items() if isinstance(metrics, Mapping) else ():
        if isinstance(metric, Mapping) and "class_path" in metric:
            with suppress(pydoc.ErrorDuringImport):  # where the class cannot be imported here
                yield name, getattr(pydoc.locate(metric["class_path"]), "higher_is_better", None)
    if "watch_metric" in content:
        yield content["watch_metric"], content.get("greater_is_better")
