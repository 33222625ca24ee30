"""The lengths of objects, the arguments that functions accept, and which names are private."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sized


def is_private(name: str) -> bool:
    """Whether a name begins with an underscore and is not a special name of Python, such as ``__init__``."""
    return name.startswith("_") and not name.endswith("__")


def find_length(thing: object) -> int | None:
    """Return ``len(thing)``, or ``None`` if the object has no length."""
    try:
        return len(thing) if isinstance(thing, Sized) else None
    except TypeError:
        return None


def accepts(function: Callable[..., object], *arguments: object) -> bool:
    """Whether a function can be called with these positional arguments."""
    try:
        inspect.signature(function).bind(*arguments)
    except (TypeError, ValueError) as error:
        return isinstance(error, ValueError)  # the function is not written in Python
    return True
