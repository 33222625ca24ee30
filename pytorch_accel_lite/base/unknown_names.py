"""``Did you mean``: suggestions for unknown names, some of which are those of other libraries."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field


@dataclass(eq=False, repr=False)
class OtherLibraries:
    """What other libraries do otherwise, for errors and warnings that say what to write here. An extension fills it in.

    Attributes:
        arguments: by the name of an argument here, of any method, the names elsewhere
        hooks: by the name of an event here, the names of hooks at the same point elsewhere
        advice: by words that have no corresponding argument, what to do instead
        attributes: by attributes of trainers elsewhere, ``"name"`` or ``"method()"``, what to use instead
        methods: functions that are called with each new subclass of the trainer and the names that it defines, and warn
            of methods that are called elsewhere and never here
    """

    arguments: dict[str, tuple[str, ...]] = field(default_factory=dict)
    hooks: dict[str, tuple[str, ...]] = field(default_factory=dict)
    advice: dict[tuple[str, ...], str] = field(default_factory=dict)
    attributes: dict[str, str] = field(default_factory=dict)
    methods: list[Callable[[type, Collection[str]], None]] = field(default_factory=list)


#: Empty without the extension.
OTHER_LIBRARIES = OtherLibraries()


def did_you_mean(word: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """Return ``" Did you mean 'x'?"`` for the closest of some names, or an empty string if none is close."""
    matches = difflib.get_close_matches(word, list(names), n=1, cutoff=cutoff)
    return f" Did you mean {matches[0]!r}?" if matches else ""


def our_names(word: str) -> list[str]:
    """Return the arguments and events of this package that have this name elsewhere."""
    return [ours for ours, theirs in OTHER_LIBRARIES.arguments.items() if word in theirs] + events_meant(word)


def events_meant(hook: str) -> list[str]:
    """Return the events of this package at the points where other libraries call a hook of this name."""
    return [event for event, hooks in OTHER_LIBRARIES.hooks.items() if hook in hooks]
