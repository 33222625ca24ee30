"""The notebook output that shows a run: its table, with live bars below."""

from __future__ import annotations

import time
from html import escape
from typing import Any
from weakref import WeakKeyDictionary

_SHORT = 0.5  # seconds before a bar is worth showing: an output, once created, stays in the notebook
_pages: WeakKeyDictionary[Any, Page] = WeakKeyDictionary()


class Page:
    """A notebook output, created once there is something to show and updated in place from then on.

    :ivar html: content above the bars; ``text`` is its plain-text alternative
    :ivar bars: the live bars
    """

    def __init__(self) -> None:
        self.html = ""
        self.text = ""
        self.bars: list[Any] = []
        self._handle: Any = None
        self._made = time.monotonic()

    def refresh(self) -> None:
        """Show the current content."""
        from IPython.display import display  # notebooks have it

        is_short = time.monotonic() - self._made < _SHORT
        if self._handle is None and not self.html and (is_short or not self.bars):
            return
        data = {"text/html": self.html + "".join(map(_bar_html, self.bars)), "text/plain": self.text}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)


def open_page(trainer: object) -> Page:
    """Return a new output for a trainer's run."""
    page = _pages[trainer] = Page()
    return page


def page_of(trainer: object) -> Page:
    """Return the output that shows a trainer's run, creating it if there is none."""
    return _pages.get(trainer) or open_page(trainer)


def leave_page(trainer: object) -> None:
    """Make a trainer's next run use a new output."""
    _pages.pop(trainer, None)


def _bar_html(bar: Any) -> str:
    share = "" if bar.total is None else f' value="{bar.n}" max="{bar.total}"'
    return (
        f'<div style="margin: 0.4em 0; font-variant-numeric: tabular-nums">{escape(bar.desc)} '
        f'<progress{share} style="width: 16em; margin: 0 0.6em; vertical-align: middle"></progress>'
        f"{escape(bar.count)} &nbsp; {escape(bar.postfix or '')}</div>"
    )
