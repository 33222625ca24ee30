"""tqdm's bars, drawn in a terminal by tqdm, by rich, or in a notebook's output."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm

from pytorch_accel_lite.base.environment import import_extra, is_terminal
from pytorch_accel_lite.callbacks.notebook import Page, leave_page, page_of

_FORMAT = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}"
_LEAST_CELLS = 6


class _TerminalBar(tqdm):  # type: ignore[misc]
    """A bar that shows as many numbers as fit into the terminal, the first ones first."""

    def set_postfix(self, ordered_dict: Any = None, refresh: bool = True, **kwargs: Any) -> None:
        numbers = dict(ordered_dict or {}, **kwargs)
        columns = None if self.disable or not self.dynamic_ncols else self.dynamic_ncols(self.fp)[0]
        if columns:
            bar = f"{self.desc}: 100%|{' ' * _LEAST_CELLS}| {self.total or self.n}/{self.total or ''}"
            while numbers and len(bar) + sum(len(f", {name}={numbers[name]}") for name in numbers) >= columns:
                numbers.popitem()
        super().set_postfix(numbers, refresh)


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
        is_line_feed = not text.strip("\n") and self.stream is self._drawn_on
        if not self._begun and ("\r" in text or "\x1b[" in text or is_line_feed):
            self.stream.write(text)
            return len(text)
        lines, newline, self._begun = (self._begun + text).rpartition("\n")
        if newline:
            with tqdm.external_write_mode(file=self._drawn_on):
                self.stream.write(f"{lines}\n")
                self.stream.flush()
        return len(text)

    def finish(self) -> None:
        """Write any incomplete line as a line of its own."""
        if self._begun:
            self.stream.write(f"{self._begun}\n")
        self._begun = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class TerminalBars:
    """Factory of bars that tqdm draws. While any is shown, text printed to the terminal appears above it."""

    def __init__(self) -> None:
        self._shown: list[Any] = []
        self._replaced: dict[str, _AboveBars] = {}
        self._stream: Any = None

    def start(self, trainer: object, **kwargs: Any) -> Any:
        """Return a bar at zero, below those that are there.

        :param kwargs: arguments of tqdm: ``desc``, ``total``, ``unit``, ``mininterval``, ``disable``
        """
        # Omits tqdm's own rate and time, which cover one epoch only, so that ours fit into 80 columns.
        counted = "{n_fmt} {unit}" if kwargs["total"] is None else _FORMAT
        if not (kwargs["disable"] or self._shown):
            self._replace_streams()
        form = f"{{desc}}: {counted}{{postfix}}"
        bar = _TerminalBar(bar_format=form, leave=False, dynamic_ncols=True, file=self._stream, **kwargs)
        if not bar.disable:
            self._shown.append(bar)
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
        others = [other for other in self._shown if other is not bar]  # tqdm bars at the same position compare equal
        if self._shown and not others:
            for name, above in self._replaced.items():
                above.finish()
                if getattr(sys, name) is above:  # unless other code has replaced it too
                    setattr(sys, name, above.stream)
            self._replaced.clear()
        self._shown = others

    def close(self) -> None:
        """Remove all bars."""
        for bar in list(self._shown):
            self.finish(bar)


class _DrawnElsewhere(tqdm):  # type: ignore[misc]
    """A bar that counts like tqdm's and decides like it when to be drawn, but not where.

    :param drawing: draws the bar, and removes it
    """

    disable: bool

    def __init__(self, drawing: NotebookBars | RichBars, **kwargs: Any) -> None:
        self._drawing = drawing
        super().__init__(gui=True, **kwargs)

    @property
    def count(self) -> str:
        """Steps done, as text."""
        return f"{self.n} {self.unit}" if self.total is None else f"{self.n}/{self.total}"

    def display(self, *args: Any, **kwargs: Any) -> None:
        self._drawing.draw(self)

    def clear(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: printed text does not disturb the bar."""

    def close(self) -> None:
        if not self.disable:
            self.disable = True
            self._drawing.remove(self)


class NotebookBars:
    """Factory of bars in the notebook output that shows a trainer's run."""

    def __init__(self) -> None:
        self._page: Page | None = None
        self._trainer: Any = None

    def start(self, trainer: object, **kwargs: Any) -> Any:
        """Return a bar at zero, as in :class:`TerminalBars`."""
        bar = _DrawnElsewhere(self, **kwargs)
        if not bar.disable:
            self._trainer = trainer
            self._page = page_of(trainer)
            self._page.bars.append(bar)
            self._page.refresh()
        return bar

    def draw(self, bar: Any) -> None:
        """Draw all bars."""
        if self._page is not None:
            self._page.refresh()

    def remove(self, bar: Any) -> None:
        """Remove a bar. Its place is kept until the next bar starts or the run ends."""
        if self._page is not None:
            self._page.bars = [other for other in self._page.bars if other is not bar]

    def finish(self, bar: Any) -> None:
        """Remove a bar. Further calls have no effect."""
        bar.close()

    def close(self) -> None:
        """Remove all bars. The next run is shown in a new output."""
        if self._page is not None:
            for bar in self._page.bars:
                bar.close()
            self._page.refresh()
            leave_page(self._trainer)
        self._page = None


class RichBars:
    """Factory of rich bars, in one live display that lasts as long as any of them (extra ``rich``).

    :param show_always: show bars even if the output is not a terminal
    """

    def __init__(self, show_always: bool) -> None:
        import_extra("rich", "rich", "style='rich'")
        self._show_always = show_always
        self._display: Any = None
        self._tasks: dict[int, tuple[Any, Any]] = {}  # bars and rich's tasks

    def _create_display(self) -> Any:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        # No auto-refresh thread redrawing ten times a second: the bars trigger a refresh when they change.
        return Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=5)),
            TextColumn("{task.fields[count]}", style="progress.download"),
            TextColumn("{task.fields[numbers]}"),
            console=Console(stderr=True, force_terminal=True if self._show_always else None),
            transient=True,
            auto_refresh=False,
            expand=True,
            redirect_stdout=bool(sys.stdout.isatty()),  # output to a file must not be diverted to the terminal
        )

    def start(self, trainer: object, **kwargs: Any) -> Any:
        """Return a bar at zero, as in :class:`TerminalBars`."""
        bar = _DrawnElsewhere(self, **kwargs)
        if not bar.disable:
            if not self._tasks:
                self._display = self._create_display()
                self._display.start()
            task = self._display.add_task(bar.desc, total=bar.total, count=bar.count, numbers="")
            self._tasks[id(bar)] = bar, task
            self.draw(bar)
        return bar

    def draw(self, bar: Any) -> None:
        """Draw a bar as it is now."""
        _, task = self._tasks[id(bar)]
        counted = {"total": bar.total, "completed": bar.n, "count": bar.count}
        self._display.update(task, numbers=bar.postfix or "", refresh=True, **counted)

    def remove(self, bar: Any) -> None:
        """Remove a bar, and the display with the last one."""
        _, task = self._tasks.pop(id(bar))
        self._display.remove_task(task)
        if not self._tasks:
            self._display.stop()

    def finish(self, bar: Any) -> None:
        """Remove a bar. Further calls have no effect."""
        bar.close()

    def close(self) -> None:
        """Remove all bars and the display."""
        for bar, _ in list(self._tasks.values()):
            bar.close()
