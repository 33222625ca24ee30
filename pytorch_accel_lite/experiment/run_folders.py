"""Reading what runs have left in their folders: metrics, settings, how they ended."""

from __future__ import annotations

import csv
import glob
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from pytorch_accel_lite.experiment.yaml_files import RESOLVED, short

Row = dict[str, Any]

_SUFFIXES = (".jsonl", ".csv")
#: Settings that say where a run wrote or what it resumed from, or that follow from others.
_BESIDE_THE_POINT = re.compile(
    r"output_dir|train\.resume_from|is_(distributed|local_process_zero|world_process_zero)|num_processes"
    r"|(num_local|num)_update_steps_per_epoch|(train|eval)_total_batch_size|eval_per_device_batch_size"
    r"|(train|eval)_dl_kwargs(\..*)?"
)

#: Settings that say where a run took place.
ENVIRONMENT = re.compile(r"processes$|device$|git commit$|version of ")


@dataclass
class RecordedRun:
    """What a run has left behind.

    :param name: its folder, relative to what all runs that are compared have in common
    :param rows: the metrics of each epoch, with ``epoch``
    :param settings: its configuration, by key, such as ``optimizer.lr``
    :param source: the file that the configuration is from; those of different kinds have different keys
    :param directions: whether greater values are better, as far as known, by metric name
    :param outcome: how it ended, if it kept a record of that
    :param seconds: how long it took, if it kept a record of that
    :param file: name of the file with its metrics, if its folder has those of several runs
    """

    folder: Path
    name: str
    rows: list[Row]
    settings: dict[str, Any] = field(default_factory=dict)
    source: str = ""
    directions: dict[str, bool | None] = field(default_factory=dict)
    outcome: str = ""
    seconds: float | None = None
    file: str = ""

    @property
    def metrics(self) -> dict[str, tuple[list[int], list[float]]]:
        """The epochs and values of each metric that is a number, by name."""
        result: dict[str, tuple[list[int], list[float]]] = {}
        for row in self.rows:
            for name, value in row.items():
                if name != "epoch" and isinstance(value, float):
                    epochs, values = result.setdefault(name, ([], []))
                    epochs.append(int(row["epoch"]))
                    values.append(value)
        return result


def find_runs(paths: Iterable[str | os.PathLike[str]]) -> tuple[list[RecordedRun], list[str]]:
    """Return the runs in folders, and the folders that have none.

    :param paths: folders of runs, folders that contain some, files with metrics, or patterns such as ``runs/*``
    :raises FileNotFoundError: if a path does not exist
    :raises ValueError: if there is no run, or a file cannot be read
    """
    runs: dict[Path, RecordedRun] = {}
    left_out: list[str] = []
    given = [os.fspath(path) for path in paths]
    for path in _expanded(given):
        found = _runs_at(path)
        runs |= {run.folder.resolve() / run.file: run for run in found}
        if not found and path.is_dir():
            left_out.append(os.fspath(path))
    if not runs:
        raise ValueError(
            f"No runs found in {', '.join(given) or 'nothing'}: there are no metrics. They are in the metrics.jsonl or "
            "metrics.csv of a MetricsFileCallback, which runs from files have by default, or in the run.json of a "
            "RunLogCallback, once an epoch has been completed."
        )
    _name(list(runs.values()))
    return list(runs.values()), left_out


def _expanded(given: Sequence[str]) -> Iterator[Path]:
    for text in given:
        if Path(text).exists():
            yield Path(text)
            continue
        found = sorted(glob.glob(text), key=natural_order)
        if not found:
            raise FileNotFoundError(f"There is no {text!r}.")
        yield from map(Path, found)


def natural_order(text: object) -> list[Any]:
    """Return the key that sorts ``run-2`` before ``run-10``."""
    parts = re.split(r"(\d+)", str(text))
    return [int(part) if part.isdigit() else part for part in parts]


def _runs_at(path: Path) -> list[RecordedRun]:
    """Return the runs in a folder, or else those in its subfolders; or that of a file with metrics."""
    if path.is_file():
        return _runs_in(path.parent, path) if path.suffix in _SUFFIXES else []
    own = _runs_in(path)
    if own:
        return own
    inner = sorted((child for child in path.iterdir() if child.is_dir()), key=natural_order)
    return [run for child in inner if not child.name.startswith(".") for run in _runs_in(child)]


def _name(runs: Sequence[RecordedRun]) -> None:
    folders = [run.folder.resolve() for run in runs]
    above = Path(os.path.commonpath([folder.parent for folder in folders]))
    for run, folder in zip(runs, folders, strict=True):
        run.name = os.fspath((folder / run.file).relative_to(above))


# ------------------------------------------------------------------------------------------------------ one run


def _runs_in(folder: Path, file: Path | None = None) -> list[RecordedRun]:
    """Return the runs that have recorded metrics in a folder, usually one; or the one that has written a file."""
    record = _read_record(folder)
    found = _read_metrics(folder)
    several = len(found) > 1
    if file is not None:
        found = [(files, rows) for files, rows in found if file.name in files]
    elif not found and record.get("metrics"):
        found = [([""], [_as_numbers(row) for row in record["metrics"]])]
    runs = []
    for files, rows in found:
        run = _read_run(folder, rows, record)
        run.file = files[0] if several else ""
        runs.append(run)
    return runs


def _read_run(folder: Path, rows: list[Row], record: Mapping[str, Any]) -> RecordedRun:
    """Return the run in a folder that has these metrics, and this ``run.json``."""
    experiment = _read_experiment(folder)
    run = RecordedRun(folder, folder.name, rows)
    run.directions = directions_in(experiment) | record.get("directions", {})
    state = {} if experiment or record else _read_state(folder)
    run.settings = settings_of(experiment, record or state)
    sources = {RESOLVED: experiment, "run.json": record, "manifest.json": state}
    run.source = next((name for name, content in sources.items() if content), "")
    if attempts := record.get("attempts"):
        run.outcome = str(attempts[-1]["outcome"]).partition(":")[0]
        run.seconds = sum(attempt.get("seconds", 0) for attempt in attempts)
    return run


def _read_metrics(folder: Path) -> list[tuple[list[str], list[Row]]]:
    """Return the metrics of each run in a folder: the names of its files, the usual one first, and the rows.

    Files whose values do not contradict each other are of one run.
    """
    usual = [folder / f"metrics{suffix}" for suffix in _SUFFIXES]
    others = [path for suffix in _SUFFIXES for path in sorted(folder.glob(f"*{suffix}"))]
    result: list[tuple[list[str], list[Row]]] = []
    for path in dict.fromkeys([*usual, *others]):
        rows = _read_rows(path) if path.is_file() and (path in usual or _is_of_epochs(path)) else []
        if not rows or not all(isinstance(row.get("epoch"), float) and next(iter(row)) != "update" for row in rows):
            continue
        for files, known in result:
            if _agree(known, rows):
                files.append(path.name)
                known[:] = _joined(known, rows)
                break
        else:
            result.append(([path.name], rows))
    return result


def _is_of_epochs(path: Path) -> bool:
    """Whether the first row of a file is that of an epoch; the file may be of any other kind."""
    with path.open(errors="replace") as file:
        first = file.readline()
    try:
        names = next(csv.reader([first]), []) if path.suffix == ".csv" else json.loads(first)
        return "epoch" in names and next(iter(names)) != "update"
    except (ValueError, TypeError, csv.Error):
        return False


def _agree(first: list[Row], second: list[Row]) -> bool:
    """Whether no number in one file is another in the other."""
    known = {(row["epoch"], name): value for row in first for name, value in row.items() if isinstance(value, float)}
    pairs = [(known.get((row["epoch"], name)), value) for row in second for name, value in row.items()]
    return all(
        one == other or (math.isnan(one) and math.isnan(other))
        for one, other in pairs
        if one is not None and isinstance(other, float)
    )


def _joined(first: list[Row], second: list[Row]) -> list[Row]:
    """Return the rows of two files, joined by epoch."""
    rows = {row["epoch"]: row for row in second}
    rows |= {row["epoch"]: row | rows.get(row["epoch"], {}) for row in first}
    return [rows[epoch] for epoch in sorted(rows)]


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
    return rows


def _as_numbers(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with floats in place of all that can be read as such, and without empty cells."""
    result: dict[str, Any] = {}
    for name, value in row.items():
        try:
            result[name] = float(value)
        except (TypeError, ValueError):
            if value not in ("", None):
                result[name] = value
    return result


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}.") from error
    return content if isinstance(content, dict) else {}


def _read_record(folder: Path) -> dict[str, Any]:
    """Return the contents of the ``run.json`` of a folder, which may be in a folder of its own in it."""
    paths = [folder / "run.json", *sorted(folder.glob("*/run.json"))]
    return next((_read_json(path) for path in paths if path.is_file()), {})


def _read_experiment(folder: Path) -> dict[str, Any]:
    path = folder / RESOLVED
    if not path.is_file():
        return {}
    try:
        return yaml.safe_load(path.read_text()) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {error}.") from error


def _read_state(folder: Path) -> dict[str, Any]:
    """Return what the newest training state of a run says about it, as its ``run.json`` would."""
    manifests = [*folder.glob("update-*/manifest.json"), *folder.glob("*/update-*/manifest.json")]
    if not manifests:
        return {}
    state = _read_json(max(manifests, key=lambda path: path.parent.name))
    about = {"config": state.get("run_config", {}), "processes": state.get("world_size")}
    return {**about, "versions": state.get("versions", {})}


# ----------------------------------------------------------------------------------------------------- settings


def settings_of(experiment: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run by key.

    :param experiment: contents of its ``experiment.yaml``, if it has one
    :param record: contents of its ``run.json``, if it has one
    """
    config = {name: record[name] for name in ("model", "loss", "optimizer", "schedule") if name in record}
    config |= record.get("config", {})
    epochs, updates = (config.get(name) or 0 for name in ("num_epochs", "num_update_steps_per_epoch"))
    if config.get("max_num_train_steps") == epochs * updates:  # it follows from the number of epochs
        del config["max_num_train_steps"]
    settings = dict(_flat(experiment or config))
    settings |= {name: record[name] for name in ("processes", "device") if name in record}
    git = record.get("git") or {}
    if "commit" in git:
        settings["git commit"] = git["commit"][:10] + (", with changes" if git.get("has_changes") else "")
    versions = record.get("versions", {}).items()
    settings |= {f"version of {name}": str(number).partition("+")[0] for name, number in versions}
    return {key: value for key, value in settings.items() if not _BESIDE_THE_POINT.fullmatch(key)}


class ClassPath(str):
    """A setting that is the path of a class or a function, unlike the name of a file, which may look the same."""


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested settings by key; a class is the value of the key above its arguments."""
    if isinstance(value, Mapping) and "class_path" in value:
        yield key, ClassPath(value["class_path"])
        value = value.get("init_args") or {}
    elif isinstance(value, Mapping) and "init_args" in value:
        value = value["init_args"] or {}
    if isinstance(value, list) and value and all(isinstance(item, Mapping) and "class_path" in item for item in value):
        value = _by_class(value)
    if not isinstance(value, Mapping):
        yield short(key), value
        return
    for name, inner in value.items():
        yield from _flat(inner, f"{key}.{name}" if key else str(name))


def _by_class(items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a list of classes and their arguments by the names of the classes."""
    named: dict[str, Any] = {}
    for item in items:
        name = item["class_path"].rpartition(".")[2]
        count = sum(key.partition("#")[0] == name for key in named)
        named[f"{name}#{count + 1}" if count else name] = item
    return named


def directions_in(experiment: Any) -> dict[str, bool | None]:
    """Return whether greater values are better of the metrics that an experiment names, as far as it tells."""
    found: dict[str, bool | None] = {}
    if isinstance(experiment, list):
        for item in experiment:
            found |= directions_in(item)
    if isinstance(experiment, Mapping):
        for inner in experiment.values():
            found |= directions_in(inner)
        metrics = experiment.get("metrics")
        if isinstance(metrics, Mapping):
            found |= {name: _direction_of_class(metric) for name, metric in metrics.items()}
        watched, greater = experiment.get("watch_metric"), experiment.get("greater_is_better")
        if watched is not None and greater is not None:
            found[watched] = greater
    return {name: direction for name, direction in found.items() if direction is not None}


def _direction_of_class(metric: Any) -> bool | None:
    """Return what the class of a metric of torchmetrics says, unless it cannot be imported here."""
    try:
        module, _, name = metric["class_path"].rpartition(".")
        kind = getattr(__import__(module, fromlist=[name]), name)
    except (TypeError, KeyError, ImportError, AttributeError, ValueError):
        return None
    return getattr(kind, "higher_is_better", None)


def is_finite(value: Any) -> bool:
    """Whether a value is a number and finite."""
    return isinstance(value, float) and math.isfinite(value)
