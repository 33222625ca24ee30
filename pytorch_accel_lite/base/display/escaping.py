"""Escaping users' texts, for display in a line and in cells of tables that spreadsheets open."""

from __future__ import annotations

import re
from typing import TypeVar

from pytorch_accel_lite.base.values.plain_values import is_number_text

T = TypeVar("T")

_FORMULA = re.compile(r"'*[=+@-]")


def escape_unprintable(text: object, keeps: str = "") -> str:
    """Return a user's text for display in a line, with unprintable characters escaped as by ``repr``.

    Line breaks would break a table, terminal codes would move the cursor, and lone surrogates fit into no file.

    Args:
        keeps: unprintable characters that stay unchanged
    """
    text = str(text)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keeps else c.encode("unicode_escape").decode() for c in text)


def as_cell(value: object) -> object:
    """Return a value for a CSV file. Texts that spreadsheets would compute as formulas get a quote."""
    if not isinstance(value, str):
        return value
    text = escape_unprintable(value)
    return f"'{text}" if _FORMULA.match(text) and not is_number_text(text) else text


def from_cell(text: T) -> T | str:
    """Return the original text of a cell from ``as_cell()``."""
    return text[1:] if isinstance(text, str) and text.startswith("'") and _FORMULA.match(text) else text
