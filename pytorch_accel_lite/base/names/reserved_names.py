"""Names that the trainer has: those that a subclass may have for attributes of its own, and those that it may not."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar, overload

from pytorch_accel_lite.base.names.unknown_names import OTHER_LIBRARIES
from pytorch_accel_lite.base.user_code import is_from_this_package

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., object])


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


def reserved(method: F) -> F:
    """Mark a method of the trainer that only its own subclasses may override."""
    vars(method)["is_reserved"] = True
    return method


def check_subclass(cls: type, trainer_class: type) -> None:
    """Check what a subclass of the trainer defines, when it is made.

    Raises:
        TypeError: if the class redefines a read-only attribute, on which the trainer relies
    """
    classes = [c for c in cls.__mro__ if c is not object and (c is cls or not issubclass(c, trainer_class))]
    defined = {name: value for c in reversed(classes) for name, value in vars(c).items()}
    for warn_of_methods in OTHER_LIBRARIES.methods:
        warn_of_methods(cls, defined)
    for name, value in defined.items() if not is_from_this_package(cls) else ():
        existing = vars(trainer_class).get(name)
        is_read_only = isinstance(existing, property) and existing.fset is None and not isinstance(value, property)
        if is_read_only or getattr(existing, "is_reserved", False):
            raise TypeError(f"{cls.__name__}.{name} is reserved: the trainer itself has and uses it. Rename yours.")
