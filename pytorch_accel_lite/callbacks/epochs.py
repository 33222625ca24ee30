"""A table of epochs, rendered as text of a given width or as HTML."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pytorch_accel_lite.base.reprs import table

_LEAST = 9  # minimum width of a column of numbers
_GAP = "  "
_MOST_ROWS = 100  # that a notebook shows, which gets the table again after every epoch

Row = dict[str, str]  # cells by column, among them "epoch" and "time"


def is_rate(name: str) -> bool:
    """Whether a number is a learning rate: ``lr``, or ``lr_<name>`` with several optimizers."""
    return name == "lr" or name.startswith("lr_")


class EpochTable:
    """The rows so far, and the columns in order of importance. Adding a row takes the same time however many there are.

    :param marked: the column whose best value is marked
    """

    def __init__(self, marked: str | None) -> None:
        self.rows: list[Row] = []
        self.columns: list[str] = []
        self._marked = marked
        self._widths = {"epoch": len("step 123"), "time": len("59.9s")}
        self._best: Row | None = None

    def add(self, row: Row, is_best: bool, columns: Sequence[str]) -> None:
        """Add a row.

        :param is_best: whether it has the best value so far
        :param columns: all columns of metrics, the most important first; those that never have a cell may be among them
        """
        row = {column: cell for column, cell in row.items() if cell}
        if self._marked in row:
            row[self._marked] += "*" if is_best else " "
        for column, cell in row.items():
            self._widths[column] = max(len(cell), self._widths.get(column, _LEAST))
        self._best = row if is_best else self._best
        self.rows.append(row)
        self.columns = [column for column in columns if column in self._widths or column in self.columns]

    def layout(self, width: int) -> dict[str, int]:
        """Return the widths of as many columns as fit."""
        room = width - self._widths["epoch"] - len(_GAP) - self._widths["time"]
        chosen: dict[str, int] = {}
        for column in self.columns:
            needed = max(len(self._title(column)), self._widths.get(column, _LEAST))
            if not chosen or needed + len(_GAP) <= room:
                chosen[column] = needed
                room -= needed + len(_GAP)
        rates_last = {column: chosen[column] for column in sorted(chosen, key=is_rate)}
        return {"epoch": self._widths["epoch"], **rates_last, "time": self._widths["time"]}

    def _title(self, column: str) -> str:
        return f"{column} " if column == self._marked else column

    def head(self, layout: dict[str, int]) -> list[str]:
        """Return the lines above the rows."""
        line = _line({column: self._title(column) for column in layout}, layout)
        return [*self._notes(layout), line, "-" * len(line)]

    def _notes(self, layout: dict[str, int]) -> list[str]:
        count = len(set(self.columns) - layout.keys())
        said = "metric is" if count == 1 else "metrics are"
        return [f"({count} more {said} in trainer.run_history)"] if count else []

    def last_line(self, layout: dict[str, int]) -> str:
        """Return the last row as text."""
        return _line(self.rows[-1], layout)

    def text(self, width: int) -> str:
        """Return the table as text; if it is long, the latest rows and the best."""
        layout = self.layout(width)
        earlier, rows = self._shown()
        return "\n".join([*earlier, *self.head(layout), *(_line(row, layout) for row in rows)])

    def _shown(self) -> tuple[list[str], list[Row]]:
        """Return the rows to show, the latest and the best, and what to say of the others."""
        rows = self.rows[-_MOST_ROWS:]
        if len(rows) == len(self.rows):
            return [], rows
        note = f"(the last {len(rows)} of {len(self.rows):,} rows; all metrics are in trainer.run_history)"
        best = [] if self._best is None or any(row is self._best for row in rows) else [self._best]
        return [note], [*best, *rows]

    def html(self, width: int, below: Sequence[str] = ()) -> str:
        """Return the table as HTML; if it is long, the latest rows and the best.

        :param width: width in characters of the equivalent text table, which determines the columns
        :param below: lines of text to show below the table
        """
        layout = self.layout(width)
        earlier, rows = self._shown()
        cells = [[row.get(column, "").rstrip(" *") for column in layout] for row in rows]
        columns = list(layout)
        bold = None
        if self._best in rows and self._marked in columns:
            bold = rows.index(self._best), columns.index(self._marked)
        return table("", cells, columns, [*earlier, *self._notes(layout), *below], bold)


def _line(cells: Row, layout: dict[str, int]) -> str:
    """Return cells as a line of text, the first aligned to the left."""
    texts = [f"{cells.get(column, ''):>{width}}" for column, width in layout.items()]
    return _GAP.join([f"{cells['epoch']:<{layout['epoch']}}", *texts[1:]])


def format_value(value: Any) -> str:
    """Return a number with four decimals, or three significant digits if small or large; empty if not a number."""
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
    if isinstance(value, int):
        return f"{value:,}"
    if not isinstance(value, float):
        return ""
    is_extreme = value != 0 and not 1e-3 <= abs(value) < 1e5
    return f"{value:.2e}" if is_extreme else f"{value:.4f}"


def format_duration(seconds: float) -> str:
    """Return a readable duration such as ``0.42s``, ``12.3s``, ``4:05`` or ``2:04:05``."""
    if seconds < 59.95:
        return f"{seconds:.2f}s" if seconds < 9.995 else f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
