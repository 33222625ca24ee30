"""Tables for terminals."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from typing import Any

_GAP = "  "


def format_column(values: Sequence[Any]) -> list[str]:
    """Return the values of a column as text, numbers with the same number of decimals, at least four digits."""
    sizes = [abs(value) for value in values if isinstance(value, float) and math.isfinite(value)]
    power = math.floor(math.log10(max(sizes))) if any(sizes) else 0
    form = f".{max(4 - max(power, 0), 0)}f" if -2 <= power < 9 else ".4g"
    return [
        "" if value is None else format(value, form) if isinstance(value, float) else str(value) for value in values
    ]


def text_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table. Columns that do not fit into the terminal follow below, after the first one again.

    :param rows: the cells of each row, the first of which has the names of the columns. The first column is
        left-aligned, the others are right-aligned.
    """
    first, *others = zip(*rows, strict=True)
    labels = [cell.ljust(max(map(len, first))) for cell in first]
    blocks = [labels]
    for cells in others:
        width = max(map(len, cells))
        if len(blocks[-1][0]) + len(_GAP) + width > shutil.get_terminal_size().columns and blocks[-1] is not labels:
            blocks.append(labels)
        blocks[-1] = [line + _GAP + cell.rjust(width) for line, cell in zip(blocks[-1], cells, strict=True)]
    lines = [line.rstrip() for block in blocks for line in ["", *block]]
    return lines[1:]
