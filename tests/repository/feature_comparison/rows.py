"""Tests declare the rows of the page that they try."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Test = TypeVar("Test", bound=Callable[..., None])
#: The rows that the tests of this folder try.
TRIED: list[str] = []


def row(*names: str) -> Callable[[Test], Test]:
    """Declare the rows of the page that a test tests."""
    TRIED.extend(names)
    return lambda test: test
