"""Common properties of all figures: colours, sizes, legends."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytorch_accel_lite.base.environment import import_extra

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Colours that can be distinguished with any kind of colour blindness, on white and on black (after Paul Tol).
COLOURS = ("#4477aa", "#ee6677", "#228833", "#aa3377", "#66ccee", "#ccbb44", "#888888")
_LINES = ("-", "--", ":", "-.")
INK = "#333333"
GRID = "#dddddd"

_LEGEND_LINE = 0.154  # inches, like all sizes here
_LETTER = 0.072
_HANDLE = 0.42


def new_figure(size: tuple[float, float], layout: str | None = "constrained") -> Figure:
    """Return an empty figure, which a notebook displays if it is the value of a cell.

    :param size: width and height in inches
    :param layout: matplotlib's layout engine; ``None`` draws twice as fast, without one
    """
    figures = import_extra("matplotlib.figure", "plot", "plot()")

    class Shown(figures.Figure):  # type: ignore[misc, name-defined]
        def _repr_png_(self) -> bytes:
            data = io.BytesIO()
            self.savefig(data, format="png")
            return data.getvalue()

    return Shown(figsize=size, dpi=120, layout=layout)


def single_axis(size: tuple[float, float], labels: Sequence[str]) -> tuple[Figure, Any]:
    """Return a figure and its only pair of axes, with room for a legend above.

    :param labels: the legend's entries
    """
    width, height = size
    left, bottom, right = 0.75, 0.55, 0.2
    top = 0.35 + legend_height(labels, width - left - right)
    figure = new_figure(size, layout=None)
    box = (left / width, bottom / height, (width - left - right) / width, (height - bottom - top) / height)
    return figure, figure.add_axes(box)


def line_style(number: int) -> dict[str, Any]:
    """Return the colour and dashes of a curve; dashes differ once all colours are used."""
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": _LINES[number // len(COLOURS) % len(_LINES)]}


def legend_columns(labels: Sequence[str], width: float) -> int:
    """Return the number of legend columns that fit into a width in inches."""
    longest = max(map(len, labels), default=0)
    return max(1, min(len(labels), int(width / (longest * _LETTER + _HANDLE))))


def legend_height(labels: Sequence[str], width: float) -> float:
    """Return the height in inches of a legend above axes of a given width."""
    return -(-len(labels) // legend_columns(labels, width)) * _LEGEND_LINE if labels else 0.0


def finish(
    axis: Any, title: str, labels: Sequence[str], handles: Sequence[Any] = (), above: float | None = None
) -> None:
    """Style axes, and add a title with the legend below it, where it hides nothing.

    :param labels: the legend's entries; empty for no legend
    :param above: height in inches reserved for the legend; ``None`` reserves what it needs
    """
    box = axis.get_position()
    width = box.width * axis.figure.get_figwidth()
    above = legend_height(labels, width) if above is None else above
    axis.set_title(title, loc="left", fontsize=10, color=INK, pad=9 + 72 * above)
    axis.grid(color=GRID, linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(INK)
    axis.tick_params(which="both", labelsize=8, color=INK, labelcolor=INK)
    for label in (axis.xaxis.label, axis.yaxis.label):
        label.set(fontsize=8.5, color=INK)
    if labels:
        axis.legend(
            handles,
            labels,
            loc="upper left",
            bbox_to_anchor=(0, 1 + (above + 0.06) / (box.height * axis.figure.get_figheight())),
            ncols=legend_columns(labels, width),
            frameon=False,
            fontsize=8,
            labelcolor=INK,
            borderaxespad=0,
            borderpad=0,
            labelspacing=0.25,
            handlelength=1.8,
            columnspacing=1.2,
        )


def save(figure: Figure, path: str | os.PathLike[str] | None) -> Figure:
    """Save a figure in the format of the path's suffix, unless the path is ``None``, and return it."""
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    return figure


def choose_scale(axis: Any, curves: Sequence[Sequence[float]]) -> None:
    """Make the vertical axis logarithmic if that shows more, and its large and small numbers readable.

    It is logarithmic if most values of the largest curve, or all of another curve, would lie at the bottom of a linear
    axis.

    :param curves: values of each curve; non-finite ones are ignored
    """
    finite = [found for curve in curves if (found := sorted(value for value in curve if math.isfinite(value)))]
    low, high = min((curve[0] for curve in finite), default=0), max((curve[-1] for curve in finite), default=0)
    if high >= 1e4:
        axis.yaxis.set_major_formatter("{x:,.0f}")
    elif 0 < high < 1e-3:
        axis.yaxis.set_major_formatter("{x:.3g}")
    else:
        axis.ticklabel_format(axis="y", useOffset=False)
    if low <= 0 or high < 30 * low:
        return
    largest = max(finite, key=lambda curve: curve[-1])
    are_squashed = largest[len(largest) // 2] < low + (high - low) / 10
    if are_squashed or any(curve[-1] < high / 30 for curve in finite):
        axis.set_yscale("log")
        # A few values near 0, such as at the end of a schedule, must not squash all others.
        axis.set_ylim(bottom=max(low, min(curve[len(curve) // 20] for curve in finite) / 10) / 1.5)
