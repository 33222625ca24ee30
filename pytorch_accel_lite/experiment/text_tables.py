"""Tables for terminals."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence

_MOST_ROWS = 40
_GAP = "  "


def text_table(rows: Sequence[Sequence[str]], columns: int | None = None) -> list[str]:
    """Return the lines of a table. Columns that do not fit follow below, after the first column again.

    :param rows: the cells of each row, the first of which has the names of the columns. The first column is
        left-aligned, the others are right-aligned.
    :param columns: number of characters in a line; by default those of the terminal, or 80
    """
    if len(rows) > _MOST_ROWS:
        half = _MOST_ROWS // 2
        rows = [*rows[:half], ["..."] * len(rows[0]), *rows[1 - half :]]
    width = shutil.get_terminal_size().columns if columns is None else columns
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    lines: list[str] = []
    for block in _blocks(widths, width):
        lines += [""] if lines else []
        for row in rows:
            cells = [row[0].ljust(widths[0]), *(row[place].rjust(widths[place]) for place in block)]
            lines.append(_GAP.join(cells).rstrip())
    return lines


def _blocks(widths: Sequence[int], width: int) -> Iterator[list[int]]:
    """Yield the places of the columns that fit beside the first one, at least one at a time."""
    block: list[int] = []
    used = widths[0]
    for place in range(1, len(widths)):
        if block and used + len(_GAP) + widths[place] > width:
            yield block
            block = []
            used = widths[0]
        block.append(place)
        used += len(_GAP) + widths[place]
    if block or len(widths) == 1:
        yield block
