"""The output of a notebook in which a run is shown: its table, and below it the bars that are live."""

from __future__ import annotations

import time
from html import escape
from typing import Any
from weakref import WeakKeyDictionary

from IPython.display import display

_SHORT = 0.5  # seconds in which no bar is needed: an output, once made, stays in the notebook
_pages: WeakKeyDictionary[Any, Page] = WeakKeyDictionary()


class Page:
    """One output, which is shown when there is something to show, and from then on updated in its place.

    :ivar html: what stands above the bars; ``text`` the same where there is no HTML
    :ivar bars: the bars that are live
    """

    def __init__(self) -> None:
        self.html = ""
        self.text = ""
        self.bars: list[Any] = []
        self._handle: Any = None
        self._made = time.monotonic()

    def refresh(self) -> None:
        """Show what there is now."""
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
    """Return the output in which a trainer's run is shown, or a new one."""
    return _pages.get(trainer) or open_page(trainer)


def leave_page(trainer: object) -> None:
    """Let the next run of a trainer be shown in another output."""
    _pages.pop(trainer, None)


def _bar_html(bar: Any) -> str:
    numbers = " ".join(f"{name}={value}" for name, value in bar.numbers.items())
    share = "" if bar.total is None else f' value="{bar.n}" max="{bar.total}"'
    return (
        f'<div style="margin: 0.4em 0; font-variant-numeric: tabular-nums">{escape(bar.description)} '
        f'<progress{share} style="width: 16em; margin: 0 0.6em; vertical-align: middle"></progress>'
        f"{escape(bar.count)} &nbsp; {escape(numbers)}</div>"
    )
