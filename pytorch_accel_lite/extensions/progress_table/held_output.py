"""Standard output that is held back until a row of the table has been printed."""

from __future__ import annotations

import sys
from typing import Any


class HeldOutput:
    """Stand-in for the standard output that holds text back, to print it after something else.

    A flush, as before a program waits for an answer, prints the text at once.
    """

    def __init__(self) -> None:
        self.stream = sys.stdout
        self._kept: list[str] = []
        self._is_held = True
        sys.stdout = self

    def restore(self) -> None:
        """Let the program print again, unless something has replaced this stand-in."""
        self._is_held = False
        if sys.stdout is self:
            sys.stdout = self.stream

    def write(self, text: str) -> int:
        """Hold text back, or print it if ``restore()`` has been called."""
        encoding = getattr(self.stream, "encoding", None)
        if encoding:
            text.encode(encoding, self.stream.errors or "strict")  # an error belongs to who prints, not to flush()
        self._kept.append(text)
        if not self._is_held:
            self.flush()
        return len(text)

    def flush(self) -> None:
        """Print the text that was held back."""
        kept, self._kept = self._kept, []
        self.stream.write("".join(kept))
        self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)
