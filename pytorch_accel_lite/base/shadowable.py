"""Attributes of a trainer that a subclass may replace by attributes of its own with the same names."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar, overload

T = TypeVar("T")


class Shadowable(Generic[T]):
    """A property that the package never reads, so that a subclass may have its own attribute of this name."""

    def __init__(self, read: Callable[..., T]) -> None:
        self._read = read
        self.__doc__ = read.__doc__

    def __repr__(self) -> str:
        return "<read-only attribute>"

    @overload
    def __get__(self, trainer: None, owner: type) -> Shadowable[T]: ...
    @overload
    def __get__(self, trainer: object, owner: type) -> T: ...
    def __get__(self, trainer: object, owner: type) -> T | Shadowable[T]:
        return self if trainer is None else self._read(trainer)

    if TYPE_CHECKING:  # with a real __set__, attributes of instances could not hide the property

        def __set__(self, trainer: object, value: object) -> None: ...
