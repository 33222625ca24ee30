"""Common properties of all figures: colours, sizes, legends."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from pytorch_accel_lite.checkpoint import file_path
from pytorch_accel_lite.utils import import_extra

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure
    from matplotlib.text import Text

#: Colours that can be distinguished with any kind of colour blindness, on white and on black (after Paul Tol).
COLOURS = ("#4477aa", "#ee6677", "#228833", "#aa3377", "#66ccee", "#ccbb44", "#888888")
_LINES = ("-", "--", ":", "-.")
#: Axes of matplotlib, whose stubs do not know what locators, styles and figures take and have.
Axes: TypeAlias = Any
INK = "#333333"
GRID = "#dddddd"

_LEGEND_LINE = 0.154  # inches, like all sizes here
_LETTER = 0.072
_HANDLE = 0.42
_MOST_LETTERS = 60  # of a title or a label, which would leave no room for the axes
_MARGINS = 1.0  # left and right of axes
# Ticks of smaller values would all read 0.00000000000, those of larger ones leave no room for the axes.
_LEAST_WRITTEN_OUT, _MOST_WRITTEN_OUT = 1e-6, 1e10


def new_figure(size: tuple[float, float]) -> Figure:
    """Return an empty figure, which a notebook displays if it is the value of a cell.

    Args:
        size: width and height in inches
    """
    figures = import_extra("matplotlib.figure", "plot", "plot()")

    class Shown(figures.Figure):  # type: ignore[misc, name-defined]
        def _repr_png_(self) -> bytes:
            data = io.BytesIO()
            self.savefig(data, format="png")
            return data.getvalue()

    figure = Shown(figsize=size, dpi=120, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
    return figure


def line_style(number: int) -> dict[str, str]:
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
    axis: Axes, title: str, labels: Sequence[str], handles: Sequence[Artist] = (), legend_room: float = 0.0
) -> None:
    """Style axes, and add a title with the legend below it, where it hides nothing.

    Args:
        labels: the legend's entries; empty for no legend
        legend_room: inches to leave below the title at least, so that titles side by side are at one height
    """
    place = axis.get_subplotspec()
    width = axis.figure.get_figwidth() * len(place.colspan) / place.get_gridspec().ncols - _MARGINS
    room = max(legend_height(labels, width), legend_room)
    text = axis.set_title(cut(title), loc="left", fontsize=10, color=INK, pad=9 + 72 * room)
    as_written(text)
    axis.grid(color=GRID, linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(INK)
    axis.tick_params(which="both", labelsize=8, color=INK, labelcolor=INK)
    for label in (axis.xaxis.label, axis.yaxis.label):
        label.set(fontsize=8.5, color=INK)
    if labels:
        legend = axis.legend(
            handles,
            labels,
            loc="lower left",
            bbox_to_anchor=(0, 1),
            ncols=legend_columns(labels, width),
            frameon=False,
            fontsize=8,
            labelcolor=INK,
            borderaxespad=0.5,
            borderpad=0,
            labelspacing=0.25,
            handlelength=1.8,
            columnspacing=1.2,
        )
        as_written(*legend.get_texts())


def cut(text: str) -> str:
    """Return a text that fits beside the axes, or its beginning."""
    return text if len(text) <= _MOST_LETTERS else f"{text[: _MOST_LETTERS - 3]}..."


def as_written(*texts: Text) -> None:
    """Draw the names in some texts as they are written, even if they have dollar signs, which begin a formula."""
    for text in texts:
        text.set_parse_math(False)
        text.set_usetex(False)


def save(figure: Figure, path: str | os.PathLike[str] | None) -> Figure:
    """Save a figure in the format of the path's suffix, unless the path is ``None``, and return it."""
    if path is not None:
        target = file_path("path", path)
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target)
    return figure


def choose_scale(axis: Axes, curves: Sequence[Sequence[float]]) -> None:
    """Make the vertical axis logarithmic if most values would lie at the bottom of a linear one.

    Args:
        curves: values of each curve; non-finite ones are ignored
    """
    values = sorted(value for curve in curves for value in curve if math.isfinite(value))
    axis.ticklabel_format(axis="y", style="plain", useOffset=False)
    low, high = (values[0], values[-1]) if values else (0, 0)
    if 0 < max(-low, high) < _LEAST_WRITTEN_OUT or max(-low, high) > _MOST_WRITTEN_OUT:
        axis.yaxis.set_major_formatter("{x:.4g}")
    if 0 < 30 * low < high and values[len(values) // 2] < low + (high - low) / 10:
        axis.set_yscale("log")
        # A few values near 0, such as at the end of a schedule, must not squash all others.
        axis.set_ylim(bottom=max(low, values[len(values) // 20] / 10) / 1.5)
