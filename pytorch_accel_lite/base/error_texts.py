"""Texts of errors: their notes, and errors described in a line."""

from __future__ import annotations

import textwrap

_NOTE_WIDTH = 80


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
