"""Escaping users' texts, for display in a line."""

from __future__ import annotations


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
