"""Progress bars for tqdm, rich and notebooks, behind the subset of tqdm's interface that is used here."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from pytorch_accel_lite.base.environment import import_extra, is_terminal
from pytorch_accel_lite.callbacks.epochs import is_rate
from pytorch_accel_lite.callbacks.notebook import leave_page, page_of

if TYPE_CHECKING:
    from pytorch_accel_lite.callbacks.notebook import Page

#: The order in which numbers are fitted into a narrow terminal.
_PRIORITY = ("loss", "run left", "samples/s", "eval_loss")  # and then learning rates
_LEAST_CELLS = 6
_MARGIN = 3  # columns for the ^C that a terminal echoes


class _TerminalBar(tqdm):  # type: ignore[misc]
    """A bar that follows the width of its terminal and shows as many numbers as fit."""

    _drawn = 0

    def display(self, msg: str | None = None, pos: int | None = None) -> Any:
        self._follow_window()
        self._drawn = len(str(self) if msg is None else msg)
        shown = super().display(msg, pos)
        self._erase_echo()
        return shown

    def clear(self, *args: Any, **kwargs: Any) -> None:
        self._follow_window()
        super().clear(*args, **kwargs)
        self._drawn = 0
        self._erase_echo()

    def _erase_echo(self) -> None:
        """Erase what the terminal echoed after a bar that has gone: the ``^C`` of an interrupt."""
        if self.columns and not self._drawn and not self.pos:
            self.fp.write("\r\x1b[K")

    def _follow_window(self) -> None:
        """Erase the last drawing if the terminal has since been narrowed and has wrapped it."""
        columns = self.columns
        if columns and columns < self._drawn and not self.disable:
            self.fp.write(f"\x1b[{(self._drawn - 1) // columns}A\r\x1b[J")
            self.sp = self.status_printer(self.fp)
            self._drawn = 0

    @property
    def columns(self) -> int | None:
        """The width of the terminal, or ``None`` if unknown."""
        try:
            return os.get_terminal_size(self.fp.fileno()).columns
        except (AttributeError, OSError, ValueError):
            return None

    def set_postfix(self, ordered_dict: Any = None, refresh: bool = True, **kwargs: Any) -> None:
        numbers = dict(ordered_dict or {}, **kwargs)
        if self.columns:
            bar = f"{self.desc}: 100%|{' ' * _LEAST_CELLS}| {self.total or self.n}/{self.total or ''}"
            numbers = _fitting(numbers, self.columns - _MARGIN - len(bar))
        super().set_postfix(numbers, refresh)


def _fitting(numbers: Mapping[str, Any], room: int) -> dict[str, Any]:
    """Return the numbers that fit into ``room`` columns as ``, name=value``; those added by subclasses come first."""
    ranks = {name: rank for rank, name in enumerate(_PRIORITY)} | dict.fromkeys(
        filter(is_rate, numbers), len(_PRIORITY)
    )
    chosen = set()
    for name in sorted(numbers, key=lambda name: ranks.get(name, -1)):
        length = len(f", {name}={numbers[name]}")
        if length <= room:
            room -= length
            chosen.add(name)
    return {name: value for name, value in numbers.items() if name in chosen}


class _AboveBars:
    """Stand-in for a terminal stream while bars are drawn: writes text above them, in complete lines.

    :param stream: the wrapped stream
    :param drawn_on: the stream on which the bars are drawn
    """

    def __init__(self, stream: Any, drawn_on: Any) -> None:
        self.stream = stream
        self._drawn_on = drawn_on
        self._begun = ""

    def write(self, text: str) -> int:
        # The user's own bars move the cursor, with line feeds too; print() ends its lines with one.
        is_drawing = "\r" in text or "\x1b[" in text or not (self._begun or text.strip("\n") or self._is_for_lines)
        if is_drawing and not self._begun:
            self.stream.write(text)
            return len(text)
        lines, newline, self._begun = (self._begun + text).rpartition("\n")
        if newline:
            self._write_above(f"{lines}\n")
        return len(text)

    @property
    def _is_for_lines(self) -> bool:
        return self.stream is not self._drawn_on

    def _write_above(self, text: str) -> None:
        with tqdm.external_write_mode(file=self._drawn_on):
            self.stream.write(text)
            self.stream.flush()

    def finish(self) -> None:
        """Write any incomplete line as a line of its own."""
        if self._begun:
            self.stream.write(f"{self._begun}\n")
        self._begun = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class TqdmBars:
    """Factory of tqdm bars. While any is shown, text printed to the terminal appears above it.

    :param refresh_seconds: minimum number of seconds between refreshes
    """

    def __init__(self, refresh_seconds: float) -> None:
        self.refresh_seconds = refresh_seconds
        self._open: list[Any] = []
        self._replaced: dict[str, _AboveBars] = {}
        self._stream: Any = None

    def start(self, trainer: object, description: str, total: int | None, unit: str, disable: bool) -> Any:
        """Return a bar at zero."""
        bar = _TerminalBar(
            total=total,
            # Omits tqdm's own rate and time, which cover one epoch only, so that ours fit into 80 columns.
            bar_format=f"{{desc}}: {'{n_fmt} {unit}' if total is None else _FORMAT}{{postfix}}",
            desc=description,
            unit=unit,
            leave=False,
            disable=disable,
            mininterval=self.refresh_seconds,
            dynamic_ncols=True,
            file=self._stream if self._open else sys.stderr,
        )
        if not disable:
            bar.dynamic_ncols = lambda _: (bar.columns and bar.columns - _MARGIN, None)
            if not self._open:
                self._replace_streams()
            self._open.append(bar)
        return bar

    def _replace_streams(self) -> None:
        self._stream = sys.stderr
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if is_terminal(stream):  # text that goes to a file does not disturb the bars
                self._replaced[name] = _AboveBars(stream, self._stream)
                setattr(sys, name, self._replaced[name])

    def finish(self, bar: Any) -> None:
        """Remove a bar. Further calls have no effect."""
        bar.close()
        others = [other for other in self._open if other is not bar]  # tqdm bars at the same position compare equal
        if self._open and not others:
            self._restore_streams()
        self._open = others

    def _restore_streams(self) -> None:
        for name, above in self._replaced.items():
            above.finish()
            if getattr(sys, name) is above:  # unless other code has replaced it too
                setattr(sys, name, above.stream)
        self._replaced.clear()

    def close(self) -> None:
        """Remove all bars."""
        for bar in list(self._open):
            self.finish(bar)


_FORMAT = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}"


class _Bar:
    """A bar that is not tqdm's, with the part of tqdm's interface that is used.

    :ivar n: steps done out of ``total``, which is ``None`` if unknown
    :ivar numbers: values shown after the bar, by name
    """

    disable = False

    def __init__(self, bars: RichBars | NotebookBars, description: str, total: int | None, unit: str) -> None:
        self.description = description
        self.n = 0
        self.total = total
        self.numbers: dict[str, Any] = {}
        self._bars = bars
        self._unit = unit

    @property
    def count(self) -> str:
        """Steps done, as text."""
        return f"{self.n} {self._unit}" if self.total is None else f"{self.n}/{self.total}"

    def update(self, steps: int) -> None:
        """Advance by a number of steps."""
        self.n += steps
        self._bars.refresh()

    def set_postfix(self, numbers: Mapping[str, Any], refresh: bool = True) -> None:
        """Set the numbers shown after the bar, from the next refresh on."""
        self.numbers = dict(numbers)
        if refresh:
            self._bars.refresh()

    def close(self) -> None:
        """Remove the bar. Further calls have no effect."""
        self._bars.finish(self)


class NotebookBars:
    """Factory of bars in the notebook output that shows a trainer's run.

    :param refresh_seconds: minimum number of seconds between refreshes
    """

    def __init__(self, refresh_seconds: float) -> None:
        self.refresh_seconds = refresh_seconds
        self._page: Page | None = None
        self._trainer: Any = None
        self._next_refresh = 0.0

    def start(self, trainer: object, description: str, total: int | None, unit: str, disable: bool) -> Any:
        """Return a bar at zero; below those that are there."""
        if disable:
            return tqdm(total=total, disable=True)
        self._trainer = trainer
        self._page = page_of(trainer)
        bar = _Bar(self, description, total, unit)
        self._page.bars.append(bar)
        self._page.refresh()
        return bar

    def refresh(self) -> None:
        """Show the bars as they are now, when it is time to."""
        now = time.monotonic()
        if self._page is not None and now >= self._next_refresh:
            self._next_refresh = now + self.refresh_seconds
            self._page.refresh()

    def finish(self, bar: Any) -> None:
        """Remove a bar. Its place is kept until the next bar starts or the run ends."""
        if self._page is not None and bar in self._page.bars:
            self._page.bars.remove(bar)

    def close(self) -> None:
        """Remove all bars. The next run is shown in a new output."""
        if self._page is not None:
            self._page.bars.clear()
            self._page.refresh()
            leave_page(self._trainer)
        self._page = None


class RichBars:
    """Factory of rich bars, in one live display that lasts as long as any of them (extra ``rich``).

    :param refresh_seconds: minimum number of seconds between refreshes
    :param show_always: show bars even if the output is not a terminal
    """

    def __init__(self, refresh_seconds: float, show_always: bool) -> None:
        import_extra("rich", "rich", "style='rich'")
        self.refresh_seconds = refresh_seconds
        self.show_always = show_always
        self._display: Any = None
        self._tasks: dict[_Bar, Any] = {}
        self._next_refresh = 0.0

    def start(self, trainer: object, description: str, total: int | None, unit: str, disable: bool) -> Any:
        """Return a bar at zero; below those that are there."""
        if disable:
            return tqdm(total=total, disable=True)
        if self._display is None:
            self._display = self._create_display()
            self._display.start()
        bar = _Bar(self, description, total, unit)
        self._tasks[bar] = self._display.add_task(description, total=total, count=bar.count, numbers="")
        self._display.refresh()
        return bar

    def _create_display(self) -> Any:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        # No auto-refresh thread redrawing ten times a second: the bars trigger a refresh when they change.
        return Progress(
            TextColumn("{task.description}", table_column=Column(no_wrap=True)),
            BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=5)),
            TextColumn("{task.fields[count]}", style="progress.download", table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[numbers]}", table_column=Column(no_wrap=True, overflow="ellipsis")),
            console=Console(stderr=True, force_terminal=True if self.show_always else None),
            transient=True,
            auto_refresh=False,
            expand=True,
            redirect_stdout=bool(sys.stdout.isatty()),  # output to a file must not be diverted to the terminal
        )

    def refresh(self) -> None:
        """Draw the bars as they are now, when it is time to."""
        now = time.monotonic()
        if self._display is None or now < self._next_refresh:
            return
        self._next_refresh = now + self.refresh_seconds
        for bar, task in self._tasks.items():
            numbers = " ".join(f"{name}={value}" for name, value in bar.numbers.items())
            self._display.update(task, total=bar.total, completed=bar.n, count=bar.count, numbers=numbers)
        self._display.refresh()

    def finish(self, bar: Any) -> None:
        """Remove a bar, and the display with the last one."""
        task = self._tasks.pop(bar, None)
        if task is not None:
            self._display.remove_task(task)
            if not self._tasks:
                self._stop()

    def close(self) -> None:
        """Remove all bars and the display."""
        if self._display is not None:
            for task in self._tasks.values():
                self._display.remove_task(task)
            self._tasks.clear()
            self._stop()

    def _stop(self) -> None:
        self._display.stop()
        self._display = None
