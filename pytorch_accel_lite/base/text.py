"""Text output: formatted values, wrapped lines."""

from __future__ import annotations

import math
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from tqdm import tqdm

from pytorch_accel_lite.base.displays import is_terminal
from pytorch_accel_lite.base.types import Tree

T = TypeVar("T")

_NOTE_WIDTH = 80
_FORMULA = re.compile(r"'*[=+@-]")


def to_number(value: object) -> Any:
    """Return a scalar of numpy or torch as a Python number; anything else unchanged."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else value


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


def as_plain(value: object) -> str | bool | float | None:
    """Return a value in a form for JSON and CSV files."""
    value = None if value is None else as_number_or_text(value)
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def as_json(value: object) -> Tree:
    """Return a nested value in a form for JSON: numbers and lists in place of tensors, and texts for all else."""
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    value = value.tolist() if hasattr(value, "tolist") else value
    return [as_json(item) for item in value] if isinstance(value, (list, tuple)) else as_plain(value)


def as_number_or_text(value: Any) -> str | bool | float:
    """Return a number, even in a tensor, as a Python number, and anything else as text."""
    if isinstance(value, (str, bool, int)):
        return value
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return str(value)


def is_number_text(text: str) -> bool:
    """Whether a text is a number, as ``-Infinity`` is."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def format_metric(value: object) -> str:
    """Format a value for display: floats, including those of numpy and in scalar tensors, with six digits."""
    value = to_number(value)
    return f"{value:.6g}" if isinstance(value, float) else escape_unprintable(value)


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


def format_duration(seconds: float) -> str:
    """Return a readable duration such as ``0.42s``, ``12.3s``, ``4:05`` or ``2:04:05``."""
    if seconds < 59.95:
        return f"{seconds:.2f}s" if seconds < 9.995 else f"{seconds:.1f}s"
    interval: str = tqdm.format_interval(round(seconds))
    return interval.removeprefix("0")


def format_bytes(size: float) -> str:
    """Return a number of bytes as text, in the largest binary unit that fits."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}" if size < 1000 else f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.3g} GiB" if size < 1000 else f"{size:,.0f} GiB"


def wrapped(text: str, indent: str = "") -> str:
    """Wrap a text to the width of the terminal, or leave it in one line if the output is not a terminal.

    Args:
        indent: prefix of all lines after the first
    """
    if not is_terminal(sys.stdout):
        return text
    columns = shutil.get_terminal_size().columns
    return textwrap.fill(text, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def add_note(error: BaseException, *lines: str) -> None:
    """Add a note to an error, with each line wrapped at 80 columns."""
    shown = []
    for line in lines:
        indent = " " * (len(line) - len(line.lstrip()) + 2) if len(lines) > 1 else ""
        shown.append(
            textwrap.fill(line, _NOTE_WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        )
    error.add_note("\n".join(shown))


def notes_of(error: BaseException) -> list[str]:
    """Return the notes of an error."""
    return list(getattr(error, "__notes__", []))


def describe_error(error: Exception) -> str:
    """Return the class and the first line of an error."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[-1] if 'Original Traceback' in str(error) else lines[0]}"


def listed(names: Iterable[object], most: int = 5) -> str:
    """Return the first of some names, and how many more there are."""
    texts = [str(name) for name in names]
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


def align(rows: Sequence[Sequence[str]], num_left: int = 0) -> list[str]:
    """Return rows of cells as lines with aligned columns: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        cells[:num_left] = [cell.ljust(width) for cell, width in zip(row[:num_left], widths, strict=False)]
        lines.append("  ".join(cells).rstrip())
    return lines
