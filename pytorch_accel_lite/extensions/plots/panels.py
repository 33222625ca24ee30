"""Panels of a plot: curves that share axes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pytorch_accel_lite.extending import MONITORS
from pytorch_accel_lite.extension_tools.metrics_and_callbacks import MetricValue, best_of, panels_by_metric


class NothingToPlotError(ValueError):
    """Raised if none of the metrics to plot is numeric."""


@dataclass(eq=False, repr=False)
class Curve:
    """A metric over the epochs.

    Args:
        label: label within its panel
        epochs: horizontal position of each value; several values of one epoch are spread over it
        values: the values of the metric
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
        title: the title of the panel
        unit: unit of the values; empty for none
        is_monitor: whether the curves describe the run rather than the quality of the model
        has_legend: whether the curves are labelled
        curves: the curves, in the order of the legend
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
    metrics: Mapping[str, tuple[Sequence[int], Sequence[MetricValue]]], directions: Mapping[str, bool | None]
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
    monitors = [title for title, _ in MONITORS.values()]
    return sorted(drawn, key=lambda panel: monitors.index(panel.title) if panel.is_monitor else -1)


def _spread(epochs: Sequence[int]) -> list[float]:
    """Return the horizontal positions of values: at the end of their epoch, or spread over it if it has several."""
    counts = Counter(epochs)
    seen: Counter[int] = Counter()
    positions = []
    for epoch in epochs:
        seen[epoch] += 1
        positions.append(epoch - 1 + seen[epoch] / counts[epoch])
    return positions
