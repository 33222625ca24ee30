"""What users see: texts, tables, pages; reports, which are the results of tools."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TextIO, TypeVar, cast

import numpy.typing as npt
import torch
from tqdm import tqdm

from pytorch_accel_lite.base.display import escape_unprintable, format_metric, is_terminal, listed, short_repr, wrapped
from pytorch_accel_lite.base.nested_values import to_number
from pytorch_accel_lite.base.types import Tree
from pytorch_accel_lite.extension_tools.templates import Column, render
from pytorch_accel_lite.run.history import PLOTS, CurvePlots

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "Column", "Report", "align", "as_number_or_text", "as_plain", "escape_unprintable", "find_plots",
    "format_duration", "format_metric", "html_table", "in_notebook", "is_terminal", "listed", "render", "short_repr",
    "shows_live", "to_number", "wrapped",
]  # fmt: skip

T = TypeVar("T")
_FORMULA = re.compile(r"'*[=+@-]")


class Plots(CurvePlots, Protocol):
    """Draws what a run has recorded and tried, for the methods ``plot()``."""

    def plot_range_test(
        self,
        lrs: Sequence[float],
        losses: Sequence[float],
        smoothed: Sequence[float],
        suggestion: float | None,
        path: str | os.PathLike[str] | None = None,
    ) -> Figure:
        """Plot the losses of a learning rate range test."""

    def plot_sheet(
        self,
        images: Sequence[npt.ArrayLike | torch.Tensor],
        titles: Sequence[str],
        path: str | os.PathLike[str] | None = None,
        columns: int = 5,
    ) -> Figure:
        """Draw images side by side."""


def find_plots(wanted_by: str) -> Plots:
    """Return what draws plots. Without it, raise an ``ImportError`` that begins with what wants it."""
    return cast(Plots, PLOTS.get(wanted_by, ImportError))


class Report:
    """The result of a tool, which consoles and notebooks show as a sentence, a table and a list of advice.

    Attributes:
        is_text: whether values are texts, aligned to the left, rather than numbers
    """

    is_text: ClassVar[bool] = False

    def summary(self) -> str:
        """Return the main result in a sentence."""
        raise NotImplementedError

    def rows(self) -> list[tuple[str, str]]:
        """Return the name and the value, as text, of each row of the table."""
        raise NotImplementedError

    def notes(self) -> Sequence[str]:
        """Return the advice to show."""
        raise NotImplementedError

    def __repr__(self) -> str:
        rows = self.rows()
        indent = " " * (max((len(name) for name, _ in rows), default=0) + 4)
        lines = [wrapped(f"  {line}", indent) for line in align(rows, 2 if self.is_text else 1)]
        notes = (wrapped(line, "    ") for text in self.notes() for line in f"- {text}".splitlines())
        return "\n".join([self.summary(), *lines, *notes])

    def _repr_html_(self) -> str:
        return html_table(self.summary(), self.rows(), notes=self.notes())


def html_table(
    title: str,
    rows: Iterable[Sequence[object]],
    columns: Sequence[str] = (),
    notes: Sequence[str] = (),
    bold: Iterable[tuple[int, int]] = (),
) -> str:
    """Return an HTML table; without ``columns``, the rows are names and values.

    Args:
        bold: rows and columns of the cells to be shown in bold
    """
    return render("table.html", title=title, rows=list(rows), columns=columns, notes=notes, bold=set(bold))


def align(rows: Sequence[Sequence[str]], num_left: int = 0) -> list[str]:
    """Return rows of cells as lines with aligned columns: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        cells[:num_left] = [cell.ljust(width) for cell, width in zip(row[:num_left], widths, strict=False)]
        lines.append("  ".join(cells).rstrip())
    return lines


def format_duration(seconds: float) -> str:
    """Return a readable duration such as ``0.42s``, ``12.3s``, ``4:05`` or ``2:04:05``."""
    if seconds < 59.95:
        return f"{seconds:.2f}s" if seconds < 9.995 else f"{seconds:.1f}s"
    interval: str = tqdm.format_interval(round(seconds))
    return interval.removeprefix("0")


def in_notebook() -> bool:
    """Whether this program runs in an IPython kernel that shows displays, rather than merely importing IPython.

    In processes forked by a kernel, as by Accelerate's ``notebook_launcher``, Jupyter shows only text.
    """
    ipython = sys.modules.get("IPython")
    kernel = getattr(ipython and ipython.get_ipython(), "kernel", None)
    session = getattr(kernel, "session", None)
    return kernel is not None and getattr(session, "pid", os.getpid()) == os.getpid()


def shows_live(stream: TextIO | None) -> bool:
    """Whether what is written to a stream is watched as it appears, in a notebook or a terminal, not kept as lines."""
    return in_notebook() or is_terminal(stream)


def format_value(value: object, scientific: bool = False) -> str:
    """Return a number with four decimals, or with three digits if it is small or large; an empty text for other values.

    Args:
        scientific: always use scientific notation
    """
    value = to_number(value)
    if not isinstance(value, (int, float)):
        return ""
    if isinstance(value, int) and not scientific:
        return f"{value:,}"
    is_extreme = value != 0 and not 1e-3 <= abs(value) < 1e5
    return f"{value:.2e}" if is_extreme or scientific else f"{value:.4f}"


def format_bytes(size: float) -> str:
    """Return a number of bytes as text, in the largest binary unit that fits."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}" if size < 1000 else f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.3g} GiB" if size < 1000 else f"{size:,.0f} GiB"


def as_cell(value: object) -> object:
    """Return a value for a CSV file. Texts that spreadsheets would compute as formulas get a quote."""
    if not isinstance(value, str):
        return value
    text = escape_unprintable(value)
    return f"'{text}" if _FORMULA.match(text) and not _is_number(text) else text


def _is_number(text: str) -> bool:
    """Whether a text is a number, as ``-Infinity`` is."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def from_cell(text: T) -> T | str:
    """Return the original text of a cell from ``as_cell()``."""
    return text[1:] if isinstance(text, str) and text.startswith("'") and _FORMULA.match(text) else text


def as_plain(value: object) -> str | bool | float | None:
    """Return a value in a form for JSON and CSV files."""
    value = None if value is None else as_number_or_text(value)
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def as_number_or_text(value: Any) -> str | bool | float:
    """Return a number, even in a tensor, as a Python number, and anything else as text."""
    if isinstance(value, (str, bool, int)):
        return value
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return str(value)


def as_json(value: object) -> Tree:
    """Return a nested value in a form for JSON: numbers and lists in place of tensors, and texts for all else."""
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    value = value.tolist() if hasattr(value, "tolist") else value
    return [as_json(item) for item in value] if isinstance(value, (list, tuple)) else as_plain(value)
