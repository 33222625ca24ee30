"""Tables in HTML, as notebooks show trainers, settings, histories and results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pytorch_accel_lite.base.templates import render


def table(title: str, rows: Iterable[Sequence[Any]], columns: Sequence[str] = (), notes: Sequence[str] = ()) -> str:
    """Return an HTML table; without columns, its rows are names and values."""
    return render("table.html", title=title, rows=list(rows), columns=columns, notes=notes)
