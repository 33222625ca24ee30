"""What is loaded only when it is used: methods, and names of modules."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


class LazyMethod:
    """A method implemented by a function in a module that is imported when the method is first accessed.

    :param module: name of the module
    :param function: name of the function; by default that of the method
    :param wrap: turns the function into the method
    """

    def __init__(self, module: str, function: str = "", wrap: Callable[[Any], Any] = lambda found: found) -> None:
        self._module = module
        self._name = function
        self._wrap = wrap

    def __set_name__(self, owner: type, name: str) -> None:
        self._owner = owner
        self._attribute = name
        self._name = self._name or name

    def __get__(self, instance: object, owner: type) -> Any:
        method = self._wrap(getattr(import_module(self._module), self._name))
        setattr(self._owner, self._attribute, method)  # later calls bypass this one
        return method.__get__(instance, owner)


class MethodsOf:
    """The functions of a module as methods of a class: ``save = MethodsOf("package.saving").save``.

    :param wrap: turns a function into the method
    """

    def __init__(self, module: str, wrap: Callable[[Any], Any] = lambda found: found) -> None:
        self._module = module
        self._wrap = wrap

    def __getattr__(self, name: str) -> LazyMethod:
        return LazyMethod(self._module, name, self._wrap)


def loaded_when_named(module: str, sources: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module some of whose names are imported from others when they are first used.

    :param module: the module's ``__name__``
    :param sources: the names, with the module that each is imported from
    """

    def find(name: str) -> Any:
        if name not in sources:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        value = getattr(import_module(sources[name]), name)
        setattr(sys.modules[module], name, value)  # later lookups bypass this function
        return value

    return find
