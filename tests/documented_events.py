"""Parses the documented order of events from the docstring of ``TrainerCallback``.

In a block, ``for each ...`` repeats what is indented below it, ``at the end of ...`` and ``after ...`` may be left out,
and so may an event with a remark that begins with "only" or "not". The name of another block stands for what is in it.
Lines of code are not events. The blocks after the loop have what some kinds of steps fire in place of the plain step.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from pytorch_accel_lite import TrainerCallback


@dataclass
class Line:
    """A line of the docstring, with those that are indented below it."""

    text: str
    below: list[Line] = field(default_factory=list)

    @property
    def event(self) -> str:
        """The event of this line, or ``""``."""
        return self.text.split()[0] if self.text.startswith("on_") else ""

    @property
    def keywords(self) -> tuple[str, ...]:
        """What the event passes by keyword."""
        return tuple(re.findall(r"\w+", self.text.removeprefix(self.event).partition("(")[0]))

    @property
    def is_of_some_runs(self) -> bool:
        """Whether the event fires only if something out of the ordinary happens."""
        return "(only" in self.text

    def lines(self) -> Iterator[Line]:
        """This line and all below it."""
        yield self
        for line in self.below:
            yield from line.lines()

    def events(self) -> list[str]:
        """The events of this line and of those below it, in order."""
        return [line.event for line in self.lines() if line.event]


def documented_blocks() -> dict[str, Line]:
    """The blocks of the docstring by their first lines: those of the loop, and those of kinds of steps."""
    documentation = inspect.getdoc(TrainerCallback)
    assert documentation is not None
    root = Line("")
    parents = [(-1, root)]
    for text in documentation.splitlines():
        depth = len(text) - len(text.lstrip())
        if not text.strip() or not depth or text.lstrip().startswith(":"):  # a sentence, or a field
            continue
        while parents[-1][0] >= depth:
            parents.pop()
        line = Line(text.strip())
        parents[-1][1].below.append(line)
        parents.append((depth, line))
    return {line.text: line for line in root.below}


def with_step(line: Line, step: Line) -> Line:
    """A block in which a kind of step takes the place of the lines that have no events but its own."""
    own = set(step.events())
    below: list[Line] = []
    for each in line.below:
        if own.issuperset(each.events()) and each.events():
            below += [] if step in below else [step]
        else:
            below.append(with_step(each, step))
    return replace(line, below=below)


def pattern(line: Line, blocks: dict[str, Line]) -> str:
    """A regular expression for the events of a block, each followed by a space."""
    if line.event:
        return f"(?:{line.event} )?" if "(only" in line.text or "(not" in line.text else f"{line.event} "
    if line.text in blocks and not line.below:
        line = blocks[line.text]
    inner = "".join(pattern(each, blocks) for each in line.below)
    if not inner:
        return ""
    if line.text.startswith("for each "):
        return f"(?:{inner})*"
    return f"(?:{inner})?" if line.text.startswith(("at the end of ", "after ")) else inner
