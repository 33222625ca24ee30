"""Progress bars of tqdm: in terminals, with as many numbers as fit; in notebooks, below the table of the run."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from html import escape
from typing import Any, ClassVar, TextIO, TypeAlias
from weakref import WeakKeyDictionary

from tqdm import tqdm

from pytorch_accel_lite.base.displays import is_terminal

_FORMAT = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}"
_DELAY = 0.5  # seconds before a bar is shown in a notebook, where an output cannot be removed
_NARROWEST = 10  # columns of a bar; numbers beside it are left out to make room


class TerminalBar(tqdm):  # type: ignore[misc]
    """A bar that stays within the width of the terminal, with as many of the first numbers beside it as fit.

    While a bar is shown, text printed to the terminal appears above it. tqdm's own rate and time, which cover only one
    epoch, are omitted, so that those of the run fit into 80 columns.
    """

    _num_shown: ClassVar[int] = 0
    _redirection: ClassVar[ExitStack] = ExitStack()
    _is_shown = False

    def __init__(self, **kwargs: object) -> None:
        if not kwargs["disable"]:
            self._is_shown = True
            if not TerminalBar._num_shown:
                TerminalBar._redirection = _print_above_bars()
            TerminalBar._num_shown += 1
        count = "{n_fmt} {unit}" if kwargs["total"] is None else _FORMAT
        stream = sys.stderr.stream if isinstance(sys.stderr, _AboveBars) else sys.stderr
        self.desc = kwargs["desc"]  # tqdm does not set it in bars that are not shown
        bar_format = f"{{desc}}: {count}{{postfix}}"
        super().__init__(bar_format=bar_format, leave=False, dynamic_ncols=True, file=stream, **kwargs)

    @property
    def format_dict(self) -> dict[str, Any]:
        """The drawn line, without numbers that would be cut off or leave no room for the bar."""
        shown: dict[str, Any] = super().format_dict
        if shown.get("ncols") and shown.get("postfix"):
            head = _FORMAT.format(percentage=100, bar=" " * _NARROWEST, n_fmt=self.n, total_fmt=self.total)
            room = shown["ncols"] - len(f"{self.desc}: {head}")
            numbers = shown["postfix"].split(", ")
            while len(", ".join(["", *numbers])) > room and numbers:
                numbers.pop()
            shown["postfix"] = ", ".join(numbers)
        return shown

    def close(self) -> None:
        """Remove the bar."""
        super().close()
        if self._is_shown:
            self._is_shown = False
            TerminalBar._num_shown -= 1
            if not TerminalBar._num_shown:
                TerminalBar._redirection.close()


class _AboveBars:
    """Stand-in for a terminal stream while bars are drawn: writes text above them, in complete lines.

    Args:
        stream: the wrapped stream
        bars: the stream on which the bars are drawn
    """

    def __init__(self, stream: TextIO, bars: TextIO) -> None:
        self.stream = stream
        self._bars = bars
        self._incomplete = ""  # the beginning of a line whose end is still to come

    def write(self, text: str) -> int:
        # The user's own bars move the cursor, with line feeds too; print() ends its lines with one.
        is_line_feed = not text.strip("\n") and self.stream is self._bars
        if not self._incomplete and ("\r" in text or "\x1b[" in text or is_line_feed):
            self.stream.write(text)
            return len(text)
        lines, newline, self._incomplete = (self._incomplete + text).rpartition("\n")
        if newline:
            with tqdm.external_write_mode(file=self._bars):
                self.stream.write(f"{lines}\n")
                self.stream.flush()
        return len(text)

    def finish(self) -> None:
        """Write any incomplete line as a separate line."""
        if self._incomplete:
            self.stream.write(f"{self._incomplete}\n")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def _print_above_bars() -> ExitStack:
    """Print above the bars until the returned stack is closed. Text to a file does not disturb them."""
    redirection = ExitStack()
    bars = sys.stderr
    for stream, redirect in ((sys.stdout, redirect_stdout), (sys.stderr, redirect_stderr)):
        if is_terminal(stream):
            above: Any = _AboveBars(stream, bars)
            redirection.callback(above.finish)
            redirection.enter_context(redirect(above))
    return redirection


class NotebookBar(tqdm):  # type: ignore[misc]
    """A bar in the notebook output of a run. tqdm decides when to draw it."""

    disable: bool

    def __init__(self, output: NotebookOutput, **kwargs: object) -> None:
        self._output = output
        super().__init__(gui=True, **kwargs)
        if not self.disable:
            output.bars.append(self)
            output.refresh()

    def display(self, *args: Any, **kwargs: Any) -> None:
        """Draw the bar together with the other bars of the output."""
        self._output.refresh()

    def clear(self, *args: Any, **kwargs: object) -> None:
        """Do nothing: printed text does not disturb the bar."""

    def close(self) -> None:
        """Remove the bar. Its space is kept until the output is refreshed."""
        self.disable = True
        self._output.bars = [bar for bar in self._output.bars if bar is not self]  # tqdm compares bars by position

    def as_html(self) -> str:
        """Return the bar as HTML."""
        share = "" if self.total is None else f' value="{self.n}" max="{self.total}"'
        count = f"{self.n} {self.unit}" if self.total is None else f"{self.n}/{self.total}"
        return (
            f'<div style="margin: 0.4em 0; font-variant-numeric: tabular-nums">{escape(self.desc)} '
            f'<progress{share} style="width: 16em; margin: 0 0.6em; vertical-align: middle"></progress>'
            f"{escape(count)} &nbsp; {escape(self.postfix or '')}</div>"
        )


class NotebookOutput:
    """The notebook output of a run, created once there is something to show, then updated in place.

    Attributes:
        html: content above the bars, as HTML
        text: the same content as plain text, for frontends that show no HTML
        bars: the live bars
    """

    _of_trainers: ClassVar[WeakKeyDictionary[object, NotebookOutput]] = WeakKeyDictionary()

    def __init__(self) -> None:
        self.html = ""
        self.text = ""
        self.bars: list[NotebookBar] = []
        self._handle: Any = None
        self._created = time.monotonic()

    @classmethod
    def of(cls, trainer: object) -> NotebookOutput:
        """Return the output that shows a trainer's run, creating it if there is none."""
        return cls._of_trainers.setdefault(trainer, cls())

    @classmethod
    def leave(cls, trainer: object) -> None:
        """Make a trainer's next run use a new output."""
        output = cls._of_trainers.pop(trainer, None)
        if output is not None:
            output.refresh()

    def refresh(self) -> None:
        """Show the current content."""
        from IPython.display import display  # notebooks have it

        is_new = time.monotonic() - self._created < _DELAY
        if self._handle is None and not self.html and (is_new or not self.bars):
            return
        data = {"text/html": self.html + "".join(bar.as_html() for bar in self.bars), "text/plain": self.text}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)


#: A bar in a terminal or a notebook.
Bar: TypeAlias = TerminalBar | NotebookBar
