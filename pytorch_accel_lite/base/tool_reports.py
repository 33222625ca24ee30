"""Results of the tools: numbers, shown as a table with advice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pytorch_accel_lite.base.formatting import align, wrapped
from pytorch_accel_lite.base.reprs import html_table


class Report:
    """The result of a tool, which consoles and notebooks show as a sentence, a table and a list of advice.

    Attributes:
        is_text: whether values are texts, aligned to the left, rather than numbers
    """

    is_text: ClassVar[bool] = False

    def summary(self) -> str:
        """Return the main result in a sentence."""
        raise NotImplementedError

    def rows(self) -> list[tuple[str, str]]:
        """Return the name and the value, as text, of each row of the table."""
        raise NotImplementedError

    def notes(self) -> Sequence[str]:
        """Return the advice to show."""
        raise NotImplementedError

    def __repr__(self) -> str:
        rows = self.rows()
        indent = " " * (max((len(name) for name, _ in rows), default=0) + 4)
        lines = [wrapped(f"  {line}", indent) for line in align(rows, 2 if self.is_text else 1)]
        notes = (wrapped(line, "    ") for text in self.notes() for line in f"- {text}".splitlines())
        return "\n".join([self.summary(), *lines, *notes])

    def _repr_html_(self) -> str:
        return html_table(self.summary(), self.rows(), notes=self.notes())
