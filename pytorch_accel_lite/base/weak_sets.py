"""Weak sets in objects that can be copied and pickled."""

from __future__ import annotations

from typing import TypeVar
from weakref import WeakSet

T = TypeVar("T")


class TransientSet(WeakSet[T]):
    """A ``WeakSet`` that is empty in copies of what holds it, also in those by pickle, which refuses a ``WeakSet``."""

    def __reduce__(self) -> tuple[type[TransientSet[T]], tuple[()]]:
        return type(self), ()
