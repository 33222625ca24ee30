"""Formatting for users: metrics, lists of names, wrapped lines."""

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
