"""Curves of a run's metrics, one panel per quantity."""

from __future__ import annotations

import io
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pytorch_accel_lite.base.environment import import_extra
from pytorch_accel_lite.plotting.figures import (
    COLOURS,
    GRID,
    INK,
    choose_scale,
    finish,
    legend_height,
    line_style,
    new_figure,
    save,
    single_axis,
)
from pytorch_accel_lite.plotting.panels import TIME, Curve, Panel, epoch_ticks, panels_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Metrics = Mapping[str, tuple[Sequence[int], Sequence[Any]]]
Directions = Mapping[str, "bool | None"]

# Inches.
_WIDTH, _HEIGHT = 3.3, 2.1
_LEFT, _RIGHT, _BOTTOM, _TITLE = 0.8, 0.2, 0.55, 0.4

# With more curves, the legend omits the best values, which are still marked.
_MOST_WITH_BEST = 5
# The parts of an epoch's time, in stacking order.
_PARTS = ("data", "forward", "backward", "optimizer", "evaluation", "saving", "callbacks")


def plot_curves(
    curves: Metrics, path: str | os.PathLike[str] | None = None, directions: Directions | None = None
) -> Figure:
    """Plot metrics over epochs: training and evaluation of a metric together, monitors in panels by unit.

    The best value of an evaluation is marked if its direction is known. An axis is logarithmic if most values would lie
    in the lowest tenth of a linear one.

    :param curves: epochs and values by metric name; metrics that are not numeric are omitted
    :param path: where to save the picture; ``None`` does not save it
    :param directions: whether larger values are better, by metric name; for losses, smaller is the default
    :raises NothingToPlotError: if no metric is numeric
    """
    import_extra("matplotlib.figure", "plot", "plot()")
    panels = panels_of(curves, directions or {})
    columns = min(len(panels), 2 if len(panels) <= 4 else 3)
    rows = [panels[start : start + columns] for start in range(0, len(panels), columns)]
    legends = [max(legend_height(_labels(panel), _WIDTH) for panel in row) for row in rows]
    width = columns * (_LEFT + _WIDTH + _RIGHT)
    height = sum(_TITLE + legend + _HEIGHT + _BOTTOM for legend in legends)
    figure = new_figure((width, height), layout=None)
    top = height
    styles = _styles(panels)
    for row, legend in zip(rows, legends, strict=True):
        top -= _TITLE + legend + _HEIGHT
        for column, panel in enumerate(row):
            left = column * (_LEFT + _WIDTH + _RIGHT) + _LEFT
            axis = figure.add_axes((left / width, top / height, _WIDTH / width, _HEIGHT / height))
            _draw(axis, panel, styles, legend)
        top -= _BOTTOM
    return save(figure, path)


def svg_panels(curves: Metrics, directions: Directions | None = None) -> list[str]:
    """Return each panel of :func:`plot_curves` as SVG for an HTML page that defines the colours.

    The colours are the CSS custom properties ``--ink``, ``--grid``, ``--series-1`` and so on.

    :raises NothingToPlotError: if no metric is numeric
    """
    matplotlib = import_extra("matplotlib", "plot", "plot()")
    panels = panels_of(curves, directions or {})
    styles = _styles(panels)
    pictures = []
    for number, panel in enumerate(panels):
        width = _LEFT + _WIDTH + _RIGHT
        legend = legend_height(_labels(panel), _WIDTH)
        height = _TITLE + legend + _HEIGHT + _BOTTOM
        figure = new_figure((width, height), layout=None)
        axis = figure.add_axes((_LEFT / width, _BOTTOM / height, _WIDTH / width, _HEIGHT / height))
        _draw(axis, panel, styles, legend)
        pictures.append(_as_svg(matplotlib, figure, number, panel.title))
    return pictures


#: Styles of the curves of runs laid over each other; further runs are drawn in grey.
_SOLID_AND_DASHED = 2 * len(COLOURS)


def overlay_style(number: int) -> dict[str, Any]:
    """Return the colour, dashes and opacity of a run's curves on a page that defines the colours."""
    if number >= _SOLID_AND_DASHED:
        return {"colour": "var(--ink)", "dashes": "", "opacity": 0.25}
    dashes = "" if number < len(COLOURS) else "6 3"
    return {"colour": f"var(--series-{number % len(COLOURS) + 1})", "dashes": dashes, "opacity": 1}


def svg_overlays(curves: Mapping[str, Sequence[tuple[Sequence[int], Sequence[float]]]]) -> list[str]:
    """Return for each metric a panel with the curves of all runs, as SVG like :func:`svg_panels`.

    The curves of run ``n`` have the class ``run-n``, and the style that :func:`overlay_style` describes.

    :param curves: epochs and values by metric name, run by run; empty for runs without this metric
    """
    matplotlib = import_extra("matplotlib", "plot", "plot()")
    pictures = []
    for number, (name, of_runs) in enumerate(curves.items()):
        drawn = [values for _, values in of_runs if any(map(math.isfinite, values))]
        if not drawn:
            continue
        figure, axis = single_axis((4.3, 2.9), [])
        for place in reversed(range(len(of_runs))):  # the first runs above the others
            epochs, values = of_runs[place]
            is_grey = place >= _SOLID_AND_DASHED
            style = {"color": INK, "alpha": 0.25} if is_grey else line_style(place)
            marker = "o" if len(values) <= 30 else None
            axis.plot(epochs, values, gid=f"run-{place}", marker=marker, markersize=2.5, linewidth=1.4, **style)
        choose_scale(axis, drawn)
        epochs_drawn = [epoch for epochs, _ in of_runs for epoch in epochs]
        ticker = import_extra("matplotlib.ticker", "plot", "plot()")
        axis.xaxis.set_major_locator(ticker.FixedLocator(epoch_ticks(min(epochs_drawn), max(epochs_drawn))))
        axis.set_xlabel("epoch")
        title = name.removesuffix("_epoch").replace("_", " ")
        finish(axis, title, [])
        pictures.append(_as_svg(matplotlib, figure, number, title))
    return pictures


def _as_svg(matplotlib: Any, figure: Figure, number: int, title: str) -> str:
    """Return a figure as SVG for a page of which it is one of several."""
    text = io.StringIO()
    # Keeps text as text; the salt makes marker ids differ between the pictures of a page.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": str(number)}):
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(text, format="svg", transparent=True, metadata=nothing)
    return _for_a_page(text.getvalue(), title)


def _for_a_page(svg: str, title: str) -> str:
    """Make an SVG file embeddable: drop its header and the ids that all figures share, and name its colours."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"| id="\w+_\d+"', "", svg)
    svg = re.sub(r' id="(run-\d+)"', r' class="\1"', svg)
    svg = re.sub(r' (width|height)="[\d.]+pt"', "", svg, count=2)
    named = {INK: "--ink", GRID: "--grid"} | {colour: f"--series-{i}" for i, colour in enumerate(COLOURS, 1)}
    for colour, name in named.items():
        svg = svg.replace(colour, f"var({name})")
    return svg.replace("<svg", f'<svg role="img" aria-label="{title.replace(chr(34), "")}"', 1)


def _styles(panels: Sequence[Panel]) -> dict[str, dict[str, Any]]:
    """Return the style of each metric label, the same in all panels."""
    labels = ["train", "eval", *(curve.label for panel in panels if not panel.is_monitor for curve in panel.curves)]
    return {label: line_style(number) for number, label in enumerate(dict.fromkeys(labels))}


def _labels(panel: Panel) -> list[str]:
    """Return the entries of a panel's legend."""
    if _is_stacked(panel):
        return [label for label, _, _ in _layers(panel)] + [curve.label for curve in _beside_layers(panel)]
    entries = []
    for curve in panel.curves:
        if curve.best is None or len(panel.curves) > _MOST_WITH_BEST:
            entries.append(curve.label)
        else:
            value, epoch = curve.values[curve.best], curve.epochs[curve.best]
            entries.append(f"{curve.label}: best {value:.4g} in epoch {epoch:.3g}")
    return [] if len(entries) == 1 and panel.curves[0].best is None else entries


def _draw(axis: Any, panel: Panel, styles: Mapping[str, dict[str, Any]], above: float) -> None:
    """Draw one panel.

    :param above: height in inches reserved for the legend
    """
    ticker = import_extra("matplotlib.ticker", "plot", "plot()")
    if _is_stacked(panel):
        handles = _stack(axis, panel)
    else:
        handles = [
            _line(axis, curve, line_style(number) if panel.is_monitor else styles[curve.label])
            for number, curve in enumerate(panel.curves)
        ]
        choose_scale(axis, [curve.values for curve in panel.curves])
        if panel.is_monitor and axis.get_yscale() == "linear" and axis.get_ylim()[0] > 0:
            axis.set_ylim(0, 1.05 * axis.dataLim.y1)  # a tiny relative change must not look large
    places = [place for curve in panel.curves for place in curve.epochs]
    axis.xaxis.set_major_locator(ticker.FixedLocator(epoch_ticks(min(places), max(places))))
    if max(places) - min(places) < 1:
        axis.set_xlim(min(places) - 0.6, max(places) + 0.6)
    axis.set(xlabel="epoch", ylabel=panel.unit)
    finish(axis, panel.title, _labels(panel), handles, above)


def _line(axis: Any, curve: Curve, style: Mapping[str, Any]) -> Any:
    """Draw a curve with a ring around its best value."""
    marker = "o" if len(curve.values) <= 30 else None
    (line,) = axis.plot(
        curve.epochs, curve.values, label=curve.label, marker=marker, markersize=2.5, linewidth=1.4, **style
    )
    if curve.best is not None:
        place = [curve.epochs[curve.best]], [curve.values[curve.best]]
        axis.scatter(*place, s=55, facecolors="none", edgecolors=style["color"], linewidths=1.4, zorder=3)
    return line


def _is_stacked(panel: Panel) -> bool:
    """Whether a panel shows how the time of an epoch was spent, with all parts for the same epochs."""
    times = {curve.label: curve.epochs for curve in panel.curves}
    whole = times.get(TIME)
    return panel.title == TIME and whole is not None and all(times.get(part) == whole for part in _PARTS)


def _layers(panel: Panel) -> list[tuple[str, list[float], dict[str, Any]]]:
    """Return the label, values and style of each layer, without negligible ones; the rest of the time is on top."""
    times = {curve.label: curve.values for curve in panel.curves}
    spent = zip(*(times[part] for part in _PARTS), strict=True)
    rest = [max(whole - sum(parts), 0.0) for whole, parts in zip(times[TIME], spent, strict=True)]
    layers = [(part, times[part], line_style(number)) for number, part in enumerate(_PARTS)]
    layers.append(("other", rest, {"color": GRID}))
    longest = max(times[TIME])
    return [layer for layer in layers if max(layer[1]) >= 0.001 * longest]


def _beside_layers(panel: Panel) -> list[Curve]:
    """Return the curves that are not parts of the total, except duplicates of a part."""
    known = [curve.values for curve in panel.curves if curve.label in _PARTS]
    return [c for c in panel.curves if c.label not in (*_PARTS, TIME) and c.values not in known]


def _stack(axis: Any, panel: Panel) -> list[Any]:
    """Draw the parts of each epoch's time as stacked layers."""
    epochs = panel.curves[0].epochs
    edges = [epoch - 0.5 for epoch in epochs] + [epochs[-1] + 0.5]
    below = [0.0] * len(epochs)
    handles = []
    for _, values, style in _layers(panel):
        above = [low + value for low, value in zip(below, values, strict=True)]
        handles.append(axis.stairs(above, edges, baseline=below, fill=True, color=style["color"], alpha=0.85))
        below = above
    handles += [_line(axis, curve, {"color": INK, "linestyle": "--"}) for curve in _beside_layers(panel)]
    return handles
