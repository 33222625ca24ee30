"""Names of the trainer: those that a subclass may have for attributes of its own, and what ``help()`` shows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar, overload

from pytorch_accel_lite.base.arguments import library_attributes
from pytorch_accel_lite.base.unknown_names import OTHER_LIBRARIES
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


C = TypeVar("C", bound=type)


class AttributeElsewhere:
    """An attribute of other libraries' trainers: reading it raises an ``AttributeError`` that says what to use."""

    def __init__(self, name: str, advice: str) -> None:
        self._name = name
        self._advice = advice

    def __repr__(self) -> str:
        return f"<not there: {self._advice}>"

    def __get__(self, instance: object, owner: type) -> AttributeElsewhere:
        if instance is None:
            return self
        raise AttributeError(f"{owner.__name__} has no {self._name}. {self._advice}")


def presented(first: Sequence[str]) -> Callable[[C], C]:
    """Return a decorator for the trainer: the order of its methods in ``help()``, and names in other libraries.

    Reading an attribute that other libraries' trainers have then raises an error that says what to use here.

    Args:
        first: the methods that ``help()`` shows first; the others follow by the alphabet
    """

    def present(cls: C) -> C:
        cls._fields = first  # type: ignore[attr-defined]  # pydoc shows the fields of a class first
        for name, advice in OTHER_LIBRARIES.attributes.items():
            setattr(cls, name.removesuffix("()"), AttributeElsewhere(name, advice))
        return cls

    return present


def names_for_users(instance: object, names: Iterable[str]) -> list[str]:
    """Return the names without private ones of this package, and without the attributes of other libraries.

    Names that the user's own classes define stay.
    """
    ours = set(filter(is_private, library_attributes(instance)))
    users = set(vars(instance)) - ours
    for kind in type(instance).__mro__[:-1]:
        if is_from_this_package(kind):
            elsewhere = {name for name, value in vars(kind).items() if isinstance(value, AttributeElsewhere)}
            ours |= elsewhere | set(filter(is_private, vars(kind)))
        else:
            users |= set(vars(kind))
    return [name for name in names if name in users or name not in ours]


def is_private(name: str) -> bool:
    """Whether a name begins with an underscore and is not a special name of Python, such as ``__init__``."""
    return name.startswith("_") and not name.endswith("__")
