"""A table of epochs, rendered as text of a given width or as HTML."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from typing import Any

_LEAST = 9  # minimum width of a column of numbers
_LEAST_FIRST = len("step 123")
_GAP = "  "
_MOST_ROWS = 100  # that a notebook shows, which gets the table again after every epoch


@dataclass
class Row:
    """A row: its epoch or step, its cells by column, how long it took, and whether it has the best value so far."""

    epoch: str
    cells: dict[str, str]
    time: str
    is_best: bool = False


Layout = tuple[int, dict[str, int], list[str]]  # width of the first column, widths of the others, columns left out


def is_rate(name: str) -> bool:
    """Whether a number is a learning rate: ``lr``, or ``lr_<name>`` with several optimizers."""
    return name == "lr" or name.startswith("lr_")


class EpochTable:
    """The rows so far, and the columns in order of importance. Adding a row takes the same time however many there are.

    :param marked: the column whose best value is marked
    """

    def __init__(self, marked: str | None) -> None:
        self.rows: list[Row] = []
        self._columns: list[str] = []
        self._marked = marked
        self._widths: dict[str, int] = {}  # of the cells of each column that has any
        self._best: Row | None = None
        self._first_width = _LEAST_FIRST
        self._time_width = len("59.9s")

    def order(self, columns: list[str]) -> None:
        """Set the order of the columns."""
        self._columns = columns

    def add(self, row: Row, columns: list[str]) -> None:
        """Add a row, which may introduce new columns."""
        row.cells = {column: cell for column, cell in row.cells.items() if cell}
        for column, cell in row.cells.items():
            self._widths[column] = max(len(cell), self._widths.get(column, _LEAST))
        self._first_width = max(len(row.epoch), self._first_width)
        self._time_width = max(len(row.time), self._time_width)
        self._best = row if row.is_best else self._best
        self.rows.append(row)
        self.order([column for column in columns if column in self._widths or column in self._columns])

    def layout(self, width: int) -> Layout:
        """Choose as many columns as fit."""
        room = width - self._first_width - len(_GAP) - self._time_width
        chosen: dict[str, int] = {}
        for column in self._columns:
            needed = max(len(column), self._widths.get(column, _LEAST)) + (column == self._marked)
            if not chosen or needed + len(_GAP) <= room:
                chosen[column] = needed
                room -= needed + len(_GAP)
        hidden = [column for column in self._columns if column not in chosen]
        shown = sorted(chosen, key=is_rate)
        return self._first_width, {column: chosen[column] for column in shown}, hidden

    def head(self, layout: Layout) -> list[str]:
        """Return the lines above the rows."""
        first, columns, hidden = layout
        titles = [f"{name} " if name == self._marked else name for name in columns]
        cells = [f"{title:>{width}}" for title, width in zip(titles, columns.values(), strict=True)]
        line = _GAP.join([f"{'epoch':<{first}}", *cells, f"{'time':>{self._time_width}}"])
        return [*_more(hidden), line, "-" * len(line)]

    def line(self, row: Row, layout: Layout) -> str:
        """Return a row as text."""
        first, columns, _ = layout
        cells = [f"{self._cell(row, column):>{width}}" for column, width in columns.items()]
        return _GAP.join([f"{row.epoch:<{first}}", *cells, f"{row.time:>{self._time_width}}"])

    def _cell(self, row: Row, column: str) -> str:
        mark = "" if column != self._marked else "*" if row.is_best else " "
        return f"{row.cells.get(column, '')}{mark}"

    def text(self, width: int) -> str:
        """Return the table as text, as in :meth:`html`."""
        layout = self.layout(width)
        earlier, rows = self._shown()
        return "\n".join([*earlier, *self.head(layout), *(self.line(row, layout) for row in rows)])

    def _shown(self) -> tuple[list[str], list[Row]]:
        """Return the rows to show, the latest and the best, and what to say of the others."""
        rows = self.rows[-_MOST_ROWS:]
        if len(rows) == len(self.rows):
            return [], rows
        said = f"(the last {len(rows)} of {len(self.rows):,} rows; all metrics are in trainer.run_history)"
        best = [] if self._best is None or any(row is self._best for row in rows) else [self._best]
        return [said], [*best, *rows]

    def html(self, width: int, below: Iterable[str] = ()) -> str:
        """Return the table as HTML; if it is long, the latest rows and the best.

        :param width: width in characters of the equivalent text table, which determines the columns
        :param below: lines of text to show below the table
        """
        _, columns, hidden = self.layout(width)
        earlier, rows = self._shown()
        head = "".join(f"<th>{escape(name)}</th>" for name in ["epoch", *columns, "time"])
        body = ""
        for row in rows:
            cells = [row.epoch, *(row.cells.get(column, "") for column in columns), row.time]
            marked = [name == self._marked and row is self._best for name in ["", *columns, ""]]
            body += "<tr>"
            for cell, is_best in zip(cells, marked, strict=True):
                body += f"<td><b>{escape(cell)}</b></td>" if is_best else f"<td>{escape(cell)}</td>"
            body += "</tr>"
        said = [*earlier, *_more(hidden), *(line.strip() for line in below)]
        lines = "".join(f'<div style="padding: 0 0.5em">{escape(line)}</div>' for line in said)
        return (
            '<div style="overflow-x: auto; font-variant-numeric: tabular-nums"><table>'
            f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{lines}"
        )


def _more(hidden: list[str]) -> list[str]:
    count = len(hidden)
    if not count:
        return []
    return [f"({count} more {'metrics are' if count > 1 else 'metric is'} in trainer.run_history)"]


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
