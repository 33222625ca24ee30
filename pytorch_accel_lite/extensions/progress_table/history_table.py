"""A history of metrics as a table of its epochs, for notebooks."""

from __future__ import annotations

from pytorch_accel_lite.extension_tools.metrics_and_callbacks import MetricValue, best_of, panels_by_metric
from pytorch_accel_lite.extension_tools.texts_and_pages import html_table
from pytorch_accel_lite.tracking import RunHistory
from pytorch_accel_lite.utils import format_metric

_MOST_ROWS = 100


def history_table(history: RunHistory) -> str | None:
    """Return a table of the last epochs, with the best values in bold of evaluated metrics whose direction is known.

    ``None`` if the history does not know the epochs of its values.
    """
    try:
        rows = history.rows()
    except TypeError:
        return None
    names = [name for name in history if any(name in row for row in rows)]
    panels = panels_by_metric(names)
    first = max(len(rows) - _MOST_ROWS, 0)
    bold = set()
    for column, name in enumerate(names, 1):
        best = best_of([row.get(name) for row in rows], name, panels[name], history.directions)
        bold |= set() if best is None else {(best - first, column)}
    shown = [[row["epoch"], *(_format_cell(row.get(name)) for name in names)] for row in rows[first:]]
    notes = [f"{first} earlier epochs are in rows() and to_dataframe()."] if first else []
    return html_table("", shown, ["epoch", *names], notes, bold)


def _format_cell(value: MetricValue | None) -> str:
    return "" if value is None else format_metric(value)
