"""Grouping metrics into panels by name: the same quantity in training and evaluation, the same unit."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from pytorch_accel_lite.base.text import visible

#: A value of a metric: numbers are drawn, and metrics with others are left out.
Value: TypeAlias = Any
# Prefix of the monitors' names, title of the panel they share, and its unit.
_MONITORS = (
    ("lr", "learning rate", ""),
    ("gradient_norm", "gradient norm", ""),
    ("clipped_updates", "clipped updates", "share of updates"),
    ("skipped_updates", "skipped updates", "updates"),
    ("loss_scale", "loss scale", ""),
    ("samples_per_second", "throughput", "samples per second"),
    ("items_per_second", "throughput of items", "items per second"),
    ("flops_per_second", "throughput of FLOPs", "FLOPs per second"),
    ("mfu", "FLOPs utilisation", "share of the peak"),
    ("memory", "memory", "MiB"),
    ("time", "time of an epoch", "seconds"),
)
_WITH_KIND = re.compile(r"(?:(.+?)_)?(train|eval|evaluation)_(.+)")
_EVAL_LOSS = re.compile(r"(.+_)eval_loss(?:_epoch)?")


class NothingToPlotError(ValueError):
    """Raised if none of the metrics to plot is numeric."""


class MetricPanel(NamedTuple):
    """The panel of a metric and its label there.

    Args:
        is_monitor: whether the metric describes the run, such as a time or a learning rate, rather than the model
        label: ``"train"``, ``"eval"``, the name of a dataset ...
    """

    title: str
    unit: str
    is_monitor: bool
    label: str


@dataclass(eq=False, repr=False)
class Curve:
    """A metric over the epochs.

    Args:
        label: label within its panel
        epochs: horizontal position of each value; several values of one epoch are spread over it
        best: index of the best value, which is marked
    """

    label: str
    epochs: list[float]
    values: list[float]
    best: int | None = None


@dataclass(eq=False, repr=False)
class Panel:
    """Curves that share axes.

    Args:
        unit: unit of the values; empty for none
        is_monitor: whether the curves describe the run rather than the quality of the model
        has_legend: whether the curves are labelled
    """

    title: str
    unit: str = ""
    is_monitor: bool = False
    has_legend: bool = True
    curves: list[Curve] = field(default_factory=list)

    def all_values(self) -> Iterator[float]:
        """Yield the values of all curves."""
        return (value for curve in self.curves for value in curve.values)


def panels_of(
    metrics: Mapping[str, tuple[Sequence[int], Sequence[Value]]], directions: Mapping[str, bool | None]
) -> list[Panel]:
    """Group metrics into panels, monitors last; metrics that are not numeric are omitted.

    Args:
        metrics: epochs and values by name
        directions: whether larger values are better, by name; ``None`` if unknown

    Raises:
        NothingToPlotError: if no metric is numeric
    """
    panels: dict[tuple[str, str], Panel] = {}
    assignments = panels_by_metric(metrics)
    for name, (epochs, values) in metrics.items():
        try:
            numbers = [float(value) for value in values]
        except (TypeError, ValueError):
            continue
        metric = assignments[name]
        panel = panels.setdefault((metric.title, metric.unit), Panel(metric.title, metric.unit, metric.is_monitor))
        best = None if metric.is_monitor else best_of(numbers, name, metric, directions)
        panel.curves.append(Curve(metric.label, _spread(epochs), numbers, best))
    if not panels:
        raise NothingToPlotError("Nothing to plot: no numeric metric has been recorded yet.")
    drawn = [panel for panel in panels.values() if any(map(math.isfinite, panel.all_values()))]
    if not drawn:
        raise NothingToPlotError("Nothing to plot: no metric has a finite value.")
    order = {title: number for number, (_, title, _) in enumerate(_MONITORS)}
    return sorted(drawn, key=lambda panel: order[panel.title] if panel.is_monitor else -1)


def panels_by_metric(names: Iterable[str]) -> dict[str, MetricPanel]:
    """Return the panel of each metric.

    Evaluations of an averaged model and of several datasets share the metric's panel; the names of their losses reveal
    the prefixes.
    """
    names = list(names)
    prefixes = {match[1] for name in names if (match := _EVAL_LOSS.fullmatch(name))}
    longest_first = sorted(prefixes, key=len, reverse=True)
    return {name: _monitor(name) or _quality(name, longest_first) for name in names}


def is_monitor(name: str) -> bool:
    """Whether a metric describes the run, such as a time or a learning rate, rather than the model."""
    return _monitor(name) is not None


def _monitor(name: str) -> MetricPanel | None:
    for start, title, unit in _MONITORS:
        if name == start or name.startswith(f"{start}_"):
            label = re.sub("_mib$", "", name.removeprefix(start)).strip("_").replace("_", " ")
            label = {"data max": "data, slowest process", "": title, "epoch": title}.get(label, label)
            return MetricPanel(title, unit, True, f"group {label}" if label.isdigit() else visible(label))
    return None


def _quality(name: str, prefixes: Sequence[str]) -> MetricPanel:
    name = name.removesuffix("_epoch")
    match = _WITH_KIND.fullmatch(name)
    if match:
        prefix, kind, title = match.groups()
        label = prefix if prefix and kind == "eval" else " ".join(filter(None, (prefix, kind)))
    else:
        prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
        title = name.removeprefix(prefix)
        label = prefix.strip("_") or "eval"
    return MetricPanel(visible(title.replace("_", " ")), "", False, visible(label.replace("_", " ")))


def direction_of(name: str, directions: Mapping[str, bool | None]) -> bool | None:
    """Return whether larger values of a metric are better; by default smaller ones for losses, ``None`` for others."""
    direction = directions.get(name)
    return False if direction is None and "loss" in name else direction


def best_of(
    values: Sequence[Value], name: str, panel: MetricPanel, directions: Mapping[str, bool | None]
) -> int | None:
    """Return the index of the best value of a metric, which is marked.

    ``None`` for training metrics, if the direction is unknown, or if no value is a finite number.
    """
    greater_is_better = direction_of(name, directions)
    finite = {i: value for i, value in enumerate(values) if isinstance(value, (int, float)) and math.isfinite(value)}
    if panel.label.endswith("train") or greater_is_better is None or not finite:
        return None
    return (max if greater_is_better else min)(finite, key=lambda index: finite[index])


def _spread(epochs: Sequence[int]) -> list[float]:
    """Return the horizontal positions of values: at the end of their epoch, or spread over it if it has several."""
    counts = Counter(epochs)
    seen: Counter[int] = Counter()
    positions = []
    for epoch in epochs:
        seen[epoch] += 1
        positions.append(epoch - 1 + seen[epoch] / counts[epoch])
    return positions
