"""Curves of a run's metrics, one panel per quantity."""

from __future__ import annotations

import io
import math
import os
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from pytorch_accel_lite.extension_tools.metrics_and_callbacks import MetricValue
from pytorch_accel_lite.extension_tools.texts_and_pages import escape_unprintable
from pytorch_accel_lite.extensions.plots.figure_style import (
    COLOURS,
    GRID,
    INK,
    Axes,
    choose_scale,
    cut,
    finish,
    legend_height,
    line_style,
    new_figure,
    save,
)
from pytorch_accel_lite.extensions.plots.panels import Curve, Panel, panels_of
from pytorch_accel_lite.utils import import_extra

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

Metrics = Mapping[str, tuple[Sequence[int], Sequence[MetricValue]]]
Directions = Mapping[str, "bool | None"]
Styles = Mapping[str, Mapping[str, str]]  # by label of a curve

_WIDTH, _HEIGHT = 4.3, 3.1  # inches of a panel, without its legend

# With more curves, the legend omits the best values, which are still marked.
_MOST_WITH_BEST = 5


def plot_curves(
    curves: Metrics, path: str | os.PathLike[str] | None = None, directions: Directions | None = None
) -> Figure:
    """Plot metrics over epochs: training and evaluation of a metric together, monitors in panels by unit.

    The best value of an evaluation is marked if its direction is known. An axis is logarithmic if most values would lie
    in the lowest tenth of a linear one.

    Args:
        curves: epochs and values by metric name; metrics that are not numeric are omitted
        path: where to save the picture; ``None`` does not save it
        directions: whether larger values are better, by metric name; for losses, smaller is the default

    Raises:
        NothingToPlotError: if no metric is numeric
    """
    panels = panels_of(curves, directions or {})
    return save(_draw_panels(panels, _styles(panels)), path)


def svg_panels(curves: Metrics, directions: Directions | None = None) -> list[str]:
    """Return each panel of ``plot_curves()`` as SVG for an HTML page that defines the colours.

    The colours are the CSS custom properties ``--ink``, ``--grid``, ``--series-1`` and so on.

    Raises:
        NothingToPlotError: if no metric is numeric
    """
    panels = panels_of(curves, directions or {})
    styles = _styles(panels)
    return [_as_svg(panel, number, styles) for number, panel in enumerate(panels)]


def svg_overlays(curves: Mapping[str, Sequence[tuple[Sequence[int], Sequence[float]]]]) -> list[str]:
    """Return for each metric a panel with the curves of all runs, as SVG like ``svg_panels()``.

    The curves of run ``n`` have the class ``run-n``, and the style that ``overlay_style()`` describes.

    Args:
        curves: epochs and values by metric name, run by run; empty for runs without this metric
    """
    panels = []
    for name, runs in curves.items():
        drawn = [
            Curve(f"run-{number}", list(epochs), list(values))
            for number, (epochs, values) in enumerate(runs)
            if any(map(math.isfinite, values))
        ]
        title = escape_unprintable(name.removesuffix("_epoch").replace("_", " "))
        panels += [Panel(title, curves=drawn[::-1], has_legend=False)] if drawn else []  # the first run on top
    numbers = range(max(map(len, curves.values()), default=0))
    styles = {f"run-{number}": line_style(number) | {"gid": f"run-{number}"} for number in numbers}
    return [_as_svg(panel, number, styles) for number, panel in enumerate(panels)]


def overlay_style(number: int) -> dict[str, str]:
    """Return the colour and dashes of a run's curves on a page that defines the colours."""
    dashes = ("", "6 3", "2 3", "6 3 2 3")
    repeat, colour = divmod(number, len(COLOURS))
    return {"colour": f"var(--series-{colour + 1})", "dashes": dashes[repeat % len(dashes)]}


def _as_svg(panel: Panel, number: int, styles: Styles) -> str:
    """Return a panel as SVG for a page with several panels."""
    matplotlib = import_extra("matplotlib", "plot", "plot()")
    text = io.StringIO()
    # Text stays text; the salt makes marker ids differ between the pictures of a page.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": str(number)}):
        no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure = _draw_panels([panel], styles)
        figure.savefig(text, format="svg", transparent=True, metadata=no_metadata)
    return _for_a_page(text.getvalue(), panel.title)


def _for_a_page(svg: str, title: str) -> str:
    """Make an SVG file embeddable: drop its header and the ids that all figures share, and name its colours."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"| id="\w+_\d+"', "", svg)
    svg = re.sub(r' id="(run-\d+)"', r' class="\1"', svg)
    svg = re.sub(r' (width|height)="[\d.]+pt"', "", svg, count=2)
    variables = {INK: "--ink", GRID: "--grid"} | {colour: f"--series-{i}" for i, colour in enumerate(COLOURS, 1)}
    for colour, name in variables.items():
        svg = svg.replace(colour, f"var({name})")
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(title)}"', 1)


def _styles(panels: Sequence[Panel]) -> dict[str, dict[str, str]]:
    """Return the style of each metric label, the same in all panels."""
    labels = ["train", "eval", *(curve.label for panel in panels if not panel.is_monitor for curve in panel.curves)]
    return {label: line_style(number) for number, label in enumerate(dict.fromkeys(labels))}


def _draw_panels(panels: Sequence[Panel], styles: Styles) -> Figure:
    """Draw panels in rows, each as high as its highest legend requires. The last row is as wide as the others."""
    columns = min(len(panels), 2 if len(panels) <= 4 else 3)
    rows = [panels[start : start + columns] for start in range(0, len(panels), columns)]
    widths = [columns * _WIDTH / len(row) for row in rows]  # of a panel
    legends = [
        max(legend_height(_labels(panel), width - 1) for panel in row) for row, width in zip(rows, widths, strict=True)
    ]
    heights = [_HEIGHT + legend for legend in legends]
    figure = new_figure((columns * _WIDTH, sum(heights)))
    grid = figure.add_gridspec(len(rows), math.lcm(1, 2, 3), height_ratios=heights)
    for number, (row, legend) in enumerate(zip(rows, legends, strict=True)):
        span = grid.ncols // len(row)
        for column, panel in enumerate(row):
            axis = figure.add_subplot(grid[number, column * span : (column + 1) * span])
            _draw(axis, panel, styles, legend_room=legend)
    return figure


def _labels(panel: Panel) -> list[str]:
    """Return the entries of a panel's legend."""
    if not panel.has_legend:
        return []
    entries = []
    for curve in panel.curves:
        if curve.best is None or len(panel.curves) > _MOST_WITH_BEST:
            entries.append(cut(curve.label))
        else:
            value, epoch = curve.values[curve.best], curve.epochs[curve.best]
            entries.append(f"{cut(curve.label)}: best {value:.4g} in epoch {epoch:.3g}")
    return [] if len(entries) == 1 and panel.curves[0].best is None else entries


def _draw(axis: Axes, panel: Panel, styles: Styles, legend_room: float) -> None:
    """Draw one panel, with at least this many inches between its title and its axes."""
    handles = []
    for number, curve in enumerate(panel.curves):
        style = line_style(number) if panel.is_monitor else styles[curve.label]
        handles.append(_line(axis, curve, style))
    choose_scale(axis, [curve.values for curve in panel.curves])
    if panel.is_monitor and axis.get_yscale() == "linear" and axis.get_ylim()[0] > 0:
        axis.set_ylim(0, 1.05 * axis.dataLim.y1)  # a tiny relative change must not look large
    axis.xaxis.get_major_locator().set_params(integer=True)
    if max(len(curve.epochs) for curve in panel.curves) == 1:
        axis.set_xticks(panel.curves[0].epochs)
    axis.set(xlabel="epoch", ylabel=panel.unit)
    finish(axis, panel.title, _labels(panel), handles, legend_room)


def _line(axis: Axes, curve: Curve, style: Mapping[str, str]) -> Line2D:
    """Draw a curve with a ring around its best value."""
    marker = "o" if len(curve.values) <= 30 else None
    line: Line2D = axis.plot(
        curve.epochs, curve.values, label=curve.label, marker=marker, markersize=2.5, linewidth=1.4, **style
    )[0]
    if curve.best is not None:
        best = [curve.epochs[curve.best]], [curve.values[curve.best]]
        axis.scatter(*best, s=55, facecolors="none", edgecolors=style["color"], linewidths=1.4, zorder=3)
    return line
