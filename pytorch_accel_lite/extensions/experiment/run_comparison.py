"""Comparing runs: the settings that differ, the best metrics, and the curves in common plots."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pytorch_accel_lite.checkpoint import file_path, write_text
from pytorch_accel_lite.extension_tools.arguments_and_errors import check_bool, check_dict
from pytorch_accel_lite.extension_tools.metrics_and_callbacks import is_loss, is_monitor
from pytorch_accel_lite.extension_tools.texts_and_pages import Column, render
from pytorch_accel_lite.extensions.experiment.results import Results, text_table
from pytorch_accel_lite.extensions.experiment.run_folders import RecordedRun, find_runs
from pytorch_accel_lite.extensions.experiment.yaml_files import ClassPath
from pytorch_accel_lite.extensions.plots import overlay_style, svg_overlays
from pytorch_accel_lite.utils import format_metric, format_value, suggest

_MISSING = "-"
_LONGEST = 36  # characters of a setting in a table
# Settings of the environment of a run.
_ENVIRONMENT = re.compile(r"processes$|device$|git commit$|version of ")


class ComparedMetric(NamedTuple):
    """A metric, and which of its values represents a run.

    Args:
        name: the name of the metric in the run history
        kind: ``"max"``, ``"min"``, or ``"last"`` for training losses and metrics of unknown direction
    """

    name: str
    kind: str

    def __str__(self) -> str:
        return f"{self.name} ({self.kind})"

    def value_in(self, run: RecordedRun) -> float | None:
        """Return the value that represents a run, or ``None`` if none is finite."""
        _, values = run.metrics.get(self.name, ([], []))
        finite = [value for value in (values[-1:] if self.kind == "last" else values) if math.isfinite(value)]
        return (max if self.kind == "max" else min)(finite, default=None)

    def rank(self, run: RecordedRun) -> float:
        """Return a number that is smaller the better a run is; infinity if it has no value."""
        value = self.value_in(run)
        return math.inf if value is None else -value if self.kind == "max" else value


@dataclass(frozen=True, repr=False)
class RunComparison(Results):
    """Runs side by side, as returned by ``compare_runs()``. Printing it shows tables.

    Args:
        runs: the runs: their names, settings, and metrics of all epochs
        metrics: the metrics that are compared, evaluations first
        differences: keys of the settings that differ
        left_out: folders without metrics
    """

    runs: list[RecordedRun]
    metrics: list[ComparedMetric]
    differences: list[str]
    left_out: list[str] = field(default_factory=list)

    def rows(self) -> list[dict[str, Any]]:
        """Return a dict for each run: ``run``, ``epochs``, the settings that differ, and its best metrics.

        A metric with the same name as another key gets the name that it has in the tables, such as ``"epochs (max)"``.
        """
        rows = []
        for run in self.runs:
            row = {"run": run.name, "epochs": int(run.rows[-1]["epoch"])}
            row |= {key: run.effective_settings.get(key) for key in self.differences}
            names = [str(metric) if metric.name in row else metric.name for metric in self.metrics]
            values = [metric.value_in(run) for metric in self.metrics]
            rows.append(row | dict(zip(names, values, strict=True)))
        return rows

    def save(self, path: str | os.PathLike[str] = "comparison.html") -> Path:
        """Write a page, in a single file, with the tables, and with plots of the curves of all runs.

        The curves need the extra ``plot``.

        Returns:
            the path of the page
        """
        target = file_path("path", path)
        write_text(target, self._page())
        return target

    def _metric_columns(self) -> list[Column]:
        """Return a table of the metrics, in which the best value of each metric is marked."""
        columns = [
            Column("run", [run.name for run in self.runs]),
            Column("outcome", [run.outcome for run in self.runs]),
            Column("epochs", [str(int(run.rows[-1]["epoch"])) for run in self.runs], True),
        ]
        for metric in self.metrics:
            values = [metric.value_in(run) for run in self.runs]
            is_ranked = metric.kind != "last" and len(self.runs) > 1 and any(value is not None for value in values)
            best = self.runs.index(min(self.runs, key=metric.rank)) if is_ranked else None
            texts = [format_value(value) or _MISSING for value in values]
            columns.append(Column(str(metric), texts, True, best))
        return [column for column in columns if any(column.texts)]  # outcomes may all be unknown

    def _setting_columns(self) -> list[Column]:
        """Return a table of the settings that differ."""
        columns = [Column("run", [run.name for run in self.runs])]
        for key in self.differences:
            values = [run.effective_settings.get(key, _MISSING) for run in self.runs]
            is_number = all(isinstance(value, (int, float)) or value == _MISSING for value in values)
            columns.append(Column(key, [_brief(value, _LONGEST) for value in values], is_number))
        return columns

    def __repr__(self) -> str:
        count = len(self.runs)
        lines = [f"{count} runs; the best of each column is marked with *", ""] if count > 1 else []
        lines += _as_text(self._metric_columns())
        if self.differences:
            lines += ["", "Settings that differ", "", *_as_text(self._setting_columns())]
        return "\n".join(lines + [line for note in self._notes() for line in ("", note)])

    def _notes(self) -> list[str]:
        """Return the notes below the tables."""
        notes = [f"Left out, without metrics: {', '.join(self.left_out)}"] if self.left_out else []
        if len({run.settings["optimizer.lr"] for run in self.runs if run.has_unused_rate}) > 1:
            notes.append("optimizer.lr differs, too, but has no effect: the scheduler sets rates of its own.")
        return notes

    def _page(self) -> str:
        shared: dict[str, Any] = {}
        for run in reversed(self.runs):
            shared |= {key: value for key, value in run.settings.items() if key not in self.differences}
        by_run = [run.metrics for run in self.runs]
        names = [metric.name for metric in self.metrics]
        curves = []
        with suppress(ImportError):  # without matplotlib
            curves = svg_overlays({name: [recorded.get(name, ([], [])) for recorded in by_run] for name in names})
        return render(
            Path(__file__).parent / "templates" / "comparison.html",
            title=f"{len(self.runs)} runs compared",
            styles=[overlay_style(number) for number in range(len(self.runs))],
            metrics=self._metric_columns(),
            settings=self._setting_columns() if self.differences else None,
            shared=[Column("name", [*shared]), Column("value", [_brief(value, None) for value in shared.values()])],
            curves=curves,
            notes=self._notes(),
        )


def compare_runs(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    directions: Mapping[str, bool] | None = None,
    sort_by: str | None = None,
) -> RunComparison:
    """Compare the settings and metrics that runs have written into their folders.

    A run is found by its metrics: the file of a ``MetricsFileCallback``, which runs from files have by default, or the
    ``run.json`` of a ``RunLogCallback``. Its settings are those in ``experiment.yaml``, or else in ``run.json``.

    Args:
        paths: folders of runs, or folders that contain runs
        directions: whether greater values are better, by metric name, for metrics of which the runs have no record;
            smaller losses are always better
        sort_by: a metric of evaluations, to have the best run first; by default they are in the given order

    Raises:
        FileNotFoundError: if a path does not exist
        ValueError: if there are no runs, or a file cannot be read; if ``sort_by`` is not a metric, or it is unknown
            which of its values are better; if no run has a metric in ``directions``
    """
    if not isinstance(paths, (str, os.PathLike, Iterable)):
        raise TypeError(f"paths={paths!r} must be folders of runs, not {type(paths).__name__}.")
    runs, left_out = find_runs([paths] if isinstance(paths, (str, os.PathLike)) else paths)
    names = list(dict.fromkeys(name for run in runs for name in run.metrics))
    for name, greater in check_dict("directions", directions).items():
        check_bool(f"directions[{name!r}]", greater)
        if name not in names:
            raise ValueError(
                f"directions has {name!r} (on the command line: --maximize or --minimize), but no run has such a "
                f"metric.{suggest(name, names)}"
            )
    greater_is_better: dict[str, bool] = {name: False for name in names if is_loss(name)}
    for run in runs:
        greater_is_better |= run.directions
    greater_is_better |= directions or {}
    kinds = {name: "max" if greater_is_better[name] else "min" for name in names if name in greater_is_better}
    kinds |= {name: "last" for name in names if name not in kinds or "train" in name.split("_")}
    metrics = [ComparedMetric(name, kinds[name]) for name in names if not is_monitor(name)]
    metrics.sort(key=lambda metric: metric.kind == "last")
    differences = _differences(runs) if len(runs) > 1 else []
    if sort_by is not None:
        ranked = {metric.name: metric for metric in metrics if metric.kind != "last"}
        if sort_by not in ranked:
            raise ValueError(
                f"sort_by={sort_by!r} must be a metric of evaluations of which it is known whether greater values are "
                f"better: {', '.join(ranked)}.{suggest(sort_by, ranked)} If the runs do not tell, pass "
                f"directions={{{sort_by!r}: True}} or False, on the command line --maximize {sort_by} or --minimize "
                f"{sort_by}."
            )
        runs = sorted(runs, key=ranked[sort_by].rank)
    return RunComparison(runs, metrics, differences, left_out)


def _differences(runs: Sequence[RecordedRun]) -> list[str]:
    """Return the settings that have several values, or that only some of the similar runs have.

    Arguments of a class that not all runs use are left out: the class itself is listed.
    """
    differences: list[str] = []
    settings = [(run.source, run.effective_settings) for run in runs]
    for key in dict.fromkeys(key for _, of_run in settings for key in of_run):
        values = [of_run[key] for _, of_run in settings if key in of_run]
        sources = {source for source, of_run in settings if key in of_run}
        some_lack_it = any(source in sources and key not in of_run for source, of_run in settings)
        is_implied = _ENVIRONMENT.match(key) or any(key.startswith(f"{other}.") for other in differences)
        is_different = any(value != values[0] for value in values)
        if is_different or (some_lack_it and not is_implied):
            differences.append(key)
    return differences


def _as_text(columns: Sequence[Column]) -> list[str]:
    """Return a table for a terminal, in which the best value of each column is marked."""
    cells = []
    for column in columns:
        marks = [" " if column.is_number and "(" in column.name else ""] * len(column.texts)
        if column.best is not None:
            marks[column.best] = "*"
        cells.append([column.name, *(text + mark for text, mark in zip(column.texts, marks, strict=True))])
    return text_table(cells)


def _brief(value: Any, longest: int | None) -> str:
    """Return a setting as text: of a class, its name without the module."""
    text = value.rpartition(".")[2] if isinstance(value, ClassPath) else format_metric(value)
    is_short = longest is None or len(text) <= longest
    return text if is_short else f"{text[: _LONGEST // 2 - 1]}…{text[-_LONGEST // 2 :]}"
