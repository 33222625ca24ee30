"""What the tools return: numbers that show themselves as a table with advice."""

from __future__ import annotations

from collections.abc import Sequence

from pytorch_accel_lite.base.reprs import table


class Report:
    """The result of a tool, which consoles and notebooks show as a sentence, a table and a list of advice."""

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
        width = max(len(name) for name, _ in rows)
        width_of_values = max(len(value) for _, value in rows)
        lines = [f"  {name:<{width}}  {value:>{width_of_values}}" for name, value in rows]
        return "\n".join([self.summary(), *lines, *(f"- {text}" for text in self.notes())])

    def _repr_html_(self) -> str:
        return table(self.summary(), self.rows(), notes=self.notes())
