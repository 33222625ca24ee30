"""Progress bars: tqdm's, and rich's with the part of tqdm's interface that is used of them."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from tqdm.auto import tqdm

from pytorch_accel_lite.utils import import_extra


class TqdmBars:
    """Makes bars of tqdm; in a notebook, where what is closed stays in the output, one of a kind serves all epochs.

    :param refresh_seconds: the least time between two refreshes
    """

    def __init__(self, refresh_seconds: float) -> None:
        self.refresh_seconds = refresh_seconds
        self._kept: dict[str, Any] = {}

    def start(self, description: str, total: int | None, unit: str, disable: bool) -> Any:
        """Return a bar at zero.

        :param description: what comes before the bar; its first word is its kind
        """
        bar = self._kept.get(description.split()[0])
        if bar is not None:
            bar.reset(total)
            bar.set_description(description)
            return bar
        bar = tqdm(
            total=total,
            # Without tqdm's own rate and time, which are of the epoch, there is room for ours in 80 columns.
            bar_format=None if total is None else "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{postfix}",
            desc=description,
            unit=unit,
            leave=False,
            disable=disable,
            mininterval=self.refresh_seconds,
        )
        if hasattr(bar, "container"):
            self._kept[description.split()[0]] = bar
        return bar

    def finish(self, bar: Any) -> None:
        """Take a bar away, unless it is to be used again."""
        if bar in self._kept.values():
            bar.refresh()
        else:
            bar.close()

    def close(self) -> None:
        """Close the bars that were kept."""
        for bar in self._kept.values():
            bar.close()
        self._kept.clear()


class RichBars:
    """Makes bars of rich, in one live display that is there while any of them is (extra ``rich``).

    :param refresh_seconds: the least time between two refreshes
    :param show_always: also when the output is no terminal
    """

    def __init__(self, refresh_seconds: float, show_always: bool) -> None:
        import_extra("rich", "rich", "style='rich'")
        self.refresh_seconds = refresh_seconds
        self.show_always = show_always
        self._display: Any = None
        self._next_refresh = 0.0

    def start(self, description: str, total: int | None, unit: str, disable: bool) -> Any:
        """Return a bar at zero; below those that are there."""
        if disable:
            return tqdm(total=total, disable=True)
        if self._display is None:
            self._display = self._create_display()
            self._display.start()
        return RichBar(self, self._display, description, total, unit)

    def _create_display(self) -> Any:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        # Its own thread, which would redraw it ten times a second, is not needed: the bars say when they have changed.
        return Progress(
            TextColumn("{task.description}", table_column=Column(no_wrap=True)),
            BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=5)),
            TextColumn("{task.fields[count]}", style="progress.download", table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[numbers]}", table_column=Column(no_wrap=True, overflow="ellipsis")),
            console=Console(stderr=True, force_terminal=True if self.show_always else None),
            transient=True,
            auto_refresh=False,
            expand=True,
            redirect_stdout=bool(sys.stdout.isatty()),  # what goes into a file must not go to the terminal instead
        )

    def finish(self, bar: Any) -> None:
        """Take a bar away."""
        bar.close()

    def refresh(self) -> None:
        """Draw the bars as they are now, when it is time to."""
        now = time.monotonic()
        if self._display is not None and now >= self._next_refresh:
            self._next_refresh = now + self.refresh_seconds
            self._display.refresh()

    def release(self) -> None:
        """End the display when its last bar has gone, but in a notebook, where each display leaves an output."""
        if self._display is not None and not self._display.tasks and not self._display.console.is_jupyter:
            self._stop()

    def close(self) -> None:
        """End the display, whatever is in it."""
        if self._display is not None:
            for task in self._display.task_ids:
                self._display.remove_task(task)
            self._stop()

    def _stop(self) -> None:
        self._display.stop()
        self._display = None


class RichBar:
    """A bar in a live display of rich."""

    disable = False

    def __init__(self, bars: RichBars, display: Any, description: str, total: int | None, unit: str) -> None:
        self._bars = bars
        self._display = display
        self._unit = unit
        self.n = 0
        self._total = total
        self._task = display.add_task(description, total=total, count=self._count(), numbers="")
        display.refresh()

    @property
    def total(self) -> int | None:
        """How far the bar goes; ``None`` when that is not known."""
        return self._total

    @total.setter
    def total(self, total: int | None) -> None:
        self._total = total
        self._show(total=total)

    def _count(self) -> str:
        return f"{self.n} {self._unit}" if self._total is None else f"{self.n}/{self._total}"

    def _show(self, **changes: Any) -> None:
        if self._task in self._display.task_ids:  # not once it has been taken away
            self._display.update(self._task, **changes)

    def update(self, steps: int) -> None:
        """Go so many steps further."""
        self.n += steps
        self._show(completed=self.n, count=self._count())
        self._bars.refresh()

    def set_postfix(self, numbers: Mapping[str, str], refresh: bool = True) -> None:
        """Show these numbers after the bar, from the next refresh on."""
        self._show(numbers=" ".join(f"{name}={value}" for name, value in numbers.items()))
        if refresh:
            self._bars.refresh()

    def close(self) -> None:
        """Take the bar away. Once is enough, more do no harm."""
        if self._task in self._display.task_ids:
            self._display.remove_task(self._task)
            self._bars.release()
