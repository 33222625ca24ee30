"""Comparing runs: what differs in their settings, their best metrics, and their curves laid over each other."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytorch_accel_lite.base.environment import import_extra, install_command
from pytorch_accel_lite.base.reprs import table
from pytorch_accel_lite.base.templates import render
from pytorch_accel_lite.base.text import did_you_mean, format_metric
from pytorch_accel_lite.callbacks.run_page import Cell, Table, format_column, format_duration
from pytorch_accel_lite.checkpoint.files import replacing
from pytorch_accel_lite.experiment.run_folders import ENVIRONMENT, ClassPath, RecordedRun, find_runs, is_finite
from pytorch_accel_lite.experiment.text_tables import text_table
from pytorch_accel_lite.plotting.curves import overlay_style, svg_overlays
from pytorch_accel_lite.plotting.panels import best_of, direction_of, place_of_each

if TYPE_CHECKING:
    import pandas as pd

_MISSING = "-"
_LONGEST = 36  # characters of a setting in a table


@dataclass(frozen=True)
class ComparedMetric:
    """A metric, and which of a run's values stands for the run.

    :param kind: ``"max"``, ``"min"``, or ``"last"`` for losses of the training and where it is unknown which is better
    """

    name: str
    kind: str

    def __str__(self) -> str:
        return f"{self.name} ({self.kind})"

    def place_in(self, run: RecordedRun) -> int | None:
        """Return the index of the value that stands for a run, or ``None`` if it has no finite one."""
        _, values = run.metrics.get(self.name, ([], []))
        if self.kind == "last":
            return len(values) - 1 if values and is_finite(values[-1]) else None
        return best_of(values, self.kind == "max")

    def value_in(self, run: RecordedRun) -> float | None:
        """Return the value that stands for a run."""
        place = self.place_in(run)
        return None if place is None else run.metrics[self.name][1][place]


@dataclass(frozen=True, repr=False)
class RunComparison:
    """Runs side by side, as returned by :func:`compare_runs`. Printing it shows tables.

    :param runs: the runs: their names, settings, and metrics of all epochs
    :param metrics: the metrics that are compared, evaluations first
    :param differences: keys of the settings that differ
    :param left_out: folders without metrics
    """

    runs: list[RecordedRun]
    metrics: list[ComparedMetric]
    differences: list[str]
    left_out: list[str] = field(default_factory=list)

    def rows(self) -> list[dict[str, Any]]:
        """Return a dict for each run: ``run``, ``epochs``, the settings that differ, and its best metrics.

        A metric that is called like one of the others is given as in the tables, such as ``"epochs (max)"``.
        """
        rows = []
        for run in self.runs:
            row = {"run": run.name, "epochs": int(run.rows[-1]["epoch"])}
            row |= {key: run.settings.get(key) for key in self.differences}
            names = [str(metric) if metric.name in row else metric.name for metric in self.metrics]
            values = [metric.value_in(run) for metric in self.metrics]
            rows.append(row | dict(zip(names, values, strict=True)))
        return rows

    def to_dataframe(self) -> pd.DataFrame:
        """Return :meth:`rows` as a ``pandas.DataFrame`` indexed by run. Needs the extra ``dataframe``."""
        return import_extra("pandas", "dataframe", "to_dataframe()").DataFrame(self.rows()).set_index("run")

    def save(self, path: str | os.PathLike[str] = "comparison.html") -> Path:
        """Write a page with the tables, and the curves of all runs laid over each other. It is a single file.

        The curves need the extra ``plot``.

        :return: its path
        """
        with replacing(Path(path)) as temporary:
            temporary.write_text(self._page())
        return Path(path)

    # ------------------------------------------------------------------------------------------------- tables

    def of_metrics(self) -> Table:
        """Return a table of the metrics, in which the best run of each is marked."""
        columns: dict[str, list[Cell]] = {"run": [Cell(run.name) for run in self.runs]}
        if any(run.outcome for run in self.runs):
            columns["outcome"] = [Cell(run.outcome) for run in self.runs]
        columns["epochs"] = [Cell(str(int(run.rows[-1]["epoch"]))) for run in self.runs]
        if any(run.seconds is not None for run in self.runs):
            columns["time"] = [Cell("" if run.seconds is None else format_duration(run.seconds)) for run in self.runs]
        for metric in self.metrics:
            values = [metric.value_in(run) for run in self.runs]
            known = [float("nan") if value is None else value for value in values]
            best = None if metric.kind == "last" or len(self.runs) == 1 else best_of(known, metric.kind == "max")
            texts = format_column(values)
            columns[str(metric)] = [Cell(text or _MISSING, index == best) for index, text in enumerate(texts)]
        return _table(columns, {name for name in columns if name not in ("run", "outcome")})

    def of_settings(self) -> Table:
        """Return a table of the settings that differ."""
        columns = {"run": [Cell(run.name) for run in self.runs]}
        numeric = set()
        for key in self.differences:
            values = [run.settings.get(key, _MISSING) for run in self.runs]
            columns[key] = [Cell(_brief(value)) for value in values]
            if all(isinstance(value, (int, float)) or value == _MISSING for value in values):
                numeric.add(key)
        return _table(columns, numeric)

    def __repr__(self) -> str:
        lines = [f"{len(self.runs)} runs; the best of each column is marked with *", ""]
        lines += text_table(_as_text(self.of_metrics(), marked=True))
        if self.differences:
            lines += ["", "Settings that differ", "", *text_table(_as_text(self.of_settings()))]
        elif len(self.runs) > 1:
            lines += ["", "Their settings are the same, as far as they are known."]
        return "\n".join([*lines, *self._notes()])

    def _repr_html_(self) -> str:
        tables = [self.of_metrics(), *([self.of_settings()] if self.differences else [])]
        titles = f"{len(self.runs)} runs", "Settings that differ"
        return "".join(
            table(title, [[cell.text for cell in row] for row in part.rows], part.columns)
            for title, part in zip(titles, tables, strict=False)
        )

    def _notes(self) -> list[str]:
        if not self.left_out:
            return []
        return ["", f"Left out, without metrics: {', '.join(self.left_out)}"]

    # --------------------------------------------------------------------------------------------------- page

    def _page(self) -> str:
        metrics, settings = self.of_metrics(), self.of_settings()
        shared: dict[str, Any] = {}
        for run in reversed(self.runs):
            shared |= {key: value for key, value in run.settings.items() if key not in self.differences}
        try:
            curves = svg_overlays(self._curves())
        except ImportError:
            curves = []
        return render(
            "comparison.html",
            title=f"{len(self.runs)} runs compared",
            names=[run.name for run in self.runs],
            styles=[overlay_style(number) for number in range(len(self.runs))],
            metrics=metrics,
            settings=settings if self.differences else None,
            shared=Table(["name", "value"], [[Cell(key), Cell(_brief(shared[key], None))] for key in shared], set()),
            curves=curves,
            how_to_plot="" if curves else install_command("plot", "matplotlib"),
            notes=[note for note in self._notes() if note],
        )

    def _curves(self) -> dict[str, list[tuple[list[int], list[float]]]]:
        """Return the epochs and values of each metric, run by run."""
        return {metric.name: [run.metrics.get(metric.name, ([], [])) for run in self.runs] for metric in self.metrics}


def compare_runs(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    directions: Mapping[str, bool] | None = None,
    sort_by: str | None = None,
) -> RunComparison:
    """Compare runs by what they have left in their folders.

    A run is found by its metrics: the file of a ``MetricsFileCallback``, which runs from files have by default, or the
    ``run.json`` of a ``RunLogCallback``. Its settings are those in ``experiment.yaml``, in ``run.json``, or else in its
    newest training state. Several files of metrics in a folder are a run each, unless their numbers are the same in
    every epoch that they share.

    :param paths: folders of runs, folders that contain some, files with metrics, or patterns such as ``"runs/*"``
    :param directions: whether greater values are better, by metric name, where the runs do not tell; losses are better
        the smaller they are
    :param sort_by: a metric, to have the best run first, or a setting that differs; by default they are in the given
        order
    :raises FileNotFoundError: if a path does not exist
    :raises ValueError: if there are no runs, or a file cannot be read, or ``sort_by`` is unknown, or a metric of which
        it is unknown which values are better, or if no run has a metric in ``directions``
    """
    given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    runs, left_out = find_runs(given)
    known: dict[str, bool | None] = {}
    for run in runs:
        known |= run.directions
    names = {name for run in runs for name in run.metrics}
    for name in directions or {}:
        if name not in names:
            raise ValueError(
                f"directions has {name!r} (on the command line: --maximize or --minimize), but no run has such a "
                f"metric.{did_you_mean(name, names)}"
            )
    known |= directions or {}
    metrics = _compared_metrics(runs, known)
    differences = _differences(runs) if len(runs) > 1 else []
    if sort_by is not None:
        runs = _sorted(runs, sort_by, metrics, known, differences)
    return RunComparison(runs, metrics, differences, left_out)


def _compared_metrics(runs: Sequence[RecordedRun], directions: Mapping[str, bool | None]) -> list[ComparedMetric]:
    places = place_of_each(dict.fromkeys(name for run in runs for name in run.metrics))
    found = []
    for name, (_, _, is_monitor, label) in places.items():
        direction = None if label.endswith("train") else direction_of(name, directions)
        kind = "last" if direction is None else "max" if direction else "min"
        if not is_monitor:
            found.append(ComparedMetric(name, kind))
    return sorted(found, key=lambda metric: metric.kind == "last")


def _differences(runs: Sequence[RecordedRun]) -> list[str]:
    """Return the settings that differ: those with several values, and those that only some of alike runs have.

    That a run lacks the arguments of a class says no more than that it has another class.
    """
    result: list[str] = []
    for key in dict.fromkeys(key for run in runs for key in run.settings):
        having = [run for run in runs if key in run.settings]
        identical = {run.source for run in having}
        is_lacking = any(run.source in identical and key not in run.settings for run in runs)
        belongs_to_another = any(key.startswith(f"{other}.") for other in result)
        is_configuration = not ENVIRONMENT.match(key)
        if any(run.settings[key] != having[0].settings[key] for run in having) or (
            is_lacking and is_configuration and not belongs_to_another
        ):
            result.append(key)
    return result


def _sorted(
    runs: Sequence[RecordedRun],
    sort_by: str,
    metrics: Sequence[ComparedMetric],
    directions: Mapping[str, bool | None],
    differences: Sequence[str],
) -> list[RecordedRun]:
    by_name = {metric.name: metric for metric in metrics}
    if sort_by in by_name:
        metric = by_name[sort_by]
        direction = direction_of(sort_by, directions)
        if direction is None:
            raise ValueError(
                f"sort_by={sort_by!r}: the runs do not tell whether greater values of this metric are better. Pass "
                f"directions={{{sort_by!r}: True}} or False, on the command line --maximize {sort_by} or --minimize "
                f"{sort_by}."
            )
        sign = -1 if direction else 1
        values = {id(run): metric.value_in(run) for run in runs}
        return sorted(runs, key=lambda run: (values[id(run)] is None, sign * (values[id(run)] or 0.0)))
    if sort_by not in differences:
        known = [*by_name, *differences]
        raise ValueError(
            f"sort_by={sort_by!r} is neither a metric nor a setting that differs.{did_you_mean(sort_by, known)} There "
            f"are {', '.join(known)}."
        )

    def place(run: RecordedRun) -> tuple[bool, bool, Any]:
        value = run.settings.get(sort_by)
        is_number = isinstance(value, (int, float))
        return value is None, not is_number, value if is_number else str(value)

    return sorted(runs, key=place)


def _table(columns: Mapping[str, Sequence[Cell]], numeric: set[str]) -> Table:
    rows = [list(row) for row in zip(*columns.values(), strict=True)]
    return Table(list(columns), rows, {index for index, name in enumerate(columns) if name in numeric})


def _as_text(table: Table, marked: bool = False) -> list[list[str]]:
    """Return the cells of a table as text; the best of a column are marked."""

    def text(cell: Cell, place: int) -> str:
        mark = ("*" if cell.is_best else " ") if marked and place in table.numbers else ""
        return cell.text + mark

    return [table.columns, *([text(cell, place) for place, cell in enumerate(row)] for row in table.rows)]


def _brief(value: Any, longest: int | None = _LONGEST) -> str:
    """Return a setting as text; of the path of a class, its name."""
    if isinstance(value, ClassPath):
        value = value.rpartition(".")[2]
    text = format_metric(value)
    if longest is None or len(text) <= longest:
        return text
    return f"{text[: longest // 2 - 1]}…{text[-longest // 2 :]}"
