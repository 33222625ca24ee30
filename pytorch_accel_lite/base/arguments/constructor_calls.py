"""Remembering the arguments that constructors were called with, and the attributes that this package's have set."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps

from pytorch_accel_lite.base.arguments.argument_checks import check_booleans
from pytorch_accel_lite.base.user_code import is_from_this_package

#: The attribute that holds the arguments with which an object was created: positional ones, and others by name.
CONSTRUCTOR_ARGUMENTS = "_constructor_arguments"
#: The attribute that holds the names of the attributes set by this package's constructors.
LIBRARY_ATTRIBUTES = "_library_attributes"
#: The attribute that shows that a constructor of this package has been called.
IS_CONSTRUCTED = "_is_constructed"


def remember_arguments(cls: type) -> None:
    """Make a constructor remember its arguments for the ``repr`` and, if it is this package's, check bool arguments."""
    constructor: Callable[..., None] = cls.__init__  # type: ignore[misc]
    if constructor is object.__init__ or getattr(constructor, "remembers_arguments", False):
        return
    checks_booleans = is_from_this_package(cls)

    @wraps(constructor)
    def remember(self: object, *args: object, **kwargs: object) -> None:
        __tracebackhide__ = True  # IPython and pytest hide this frame
        vars(self).setdefault(CONSTRUCTOR_ARGUMENTS, (args, kwargs))  # the constructor of the subclass comes first
        before = set(vars(self))
        if checks_booleans:
            vars(self)[IS_CONSTRUCTED] = True
            check_booleans(constructor, (self, *args), kwargs)
        constructor(self, *args, **kwargs)
        if is_from_this_package(cls) and not is_from_this_package(type(self)):
            vars(self).setdefault(LIBRARY_ATTRIBUTES, set()).update(vars(self).keys() - before)

    remember.remembers_arguments = True  # type: ignore[attr-defined]
    cls.__init__ = remember  # type: ignore[misc]


def constructor_arguments(instance: object) -> tuple[tuple[object, ...], dict[str, object]]:
    """Return the arguments with which an object was created: positional ones, and others by name."""
    arguments: tuple[tuple[object, ...], dict[str, object]] = vars(instance).get(CONSTRUCTOR_ARGUMENTS, ((), {}))
    return arguments


def library_attributes(instance: object) -> set[str]:
    """Return the names of the attributes that this package has set in an object when it was created."""
    return {CONSTRUCTOR_ARGUMENTS, LIBRARY_ATTRIBUTES, *vars(instance).get(LIBRARY_ATTRIBUTES, ())}


def arguments_of(instance: object, with_defaults: bool = False) -> dict[str, object]:
    """Return the arguments with which an object was created, by name.

    Args:
        with_defaults: whether to include the defaults of arguments that were not passed
    """
    args, kwargs = constructor_arguments(instance)
    bound = inspect.signature(type(instance)).bind_partial(*args, **kwargs)
    if with_defaults:
        bound.apply_defaults()
    return dict(bound.arguments)
