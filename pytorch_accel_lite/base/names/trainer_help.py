"""What ``help()`` and completion show of the trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from pytorch_accel_lite.base.arguments.constructor_calls import library_attributes
from pytorch_accel_lite.base.names.unknown_names import OTHER_LIBRARIES
from pytorch_accel_lite.base.user_code import is_from_this_package

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
