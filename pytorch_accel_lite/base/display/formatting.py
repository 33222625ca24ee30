"""Formatting for users: metrics, sizes, lists of names, wrapped lines."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable
from typing import TextIO

from pytorch_accel_lite.base.display.escaping import escape_unprintable
from pytorch_accel_lite.base.values.plain_values import to_number


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


def listed(names: Iterable[object], most: int = 5) -> str:
    """Return the first of some names, and how many more there are."""
    texts = [str(name) for name in names]
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a stream is a terminal; ``None`` is not one."""
    return bool(stream is not None and stream.isatty())
