"""Texts for people: values, wrapped lines, suggestions."""

from __future__ import annotations

import difflib
import shutil
import sys
import textwrap
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from pytorch_accel_lite.base.environment import is_terminal


def format_metric(value: Any) -> str:
    """Format a value for display: floats, including numpy's and those in scalar tensors, with six digits."""
    if not isinstance(value, str) and hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def wrapped(text: str, indent: str = "") -> str:
    """Wrap a text to the width of the terminal, or leave it in one line if the output is not a terminal.

    :param indent: prefix of all lines after the first
    """
    if not is_terminal(sys.stdout):
        return text
    columns = shutil.get_terminal_size().columns
    return textwrap.fill(text, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def align(rows: Sequence[Sequence[str]], num_left: int = 0) -> list[str]:
    """Return rows of cells as lines with aligned columns: the first ones to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        cells[:num_left] = [cell.ljust(width) for cell, width in zip(row[:num_left], widths, strict=False)]
        lines.append("  ".join(cells).rstrip())
    return lines


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return ``" Did you mean 'x'?"`` for the closest of the known words, or an empty string if none is close."""
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f" Did you mean {matches[0]!r}?" if matches else ""


def warn_of_metric_name(name: str) -> None:
    """Warn of a metric with the name of the column of epochs; code for the ancestor may record one."""
    if name == "epoch":
        warnings.warn(
            "The metric 'epoch' is left out of tables and files, whose column of epochs has this name. Record it under "
            "another name.",
            stacklevel=3,
        )
