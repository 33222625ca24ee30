"""Telling the user's code from this package's and from libraries, for messages."""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from functools import lru_cache
from pathlib import Path

#: The directories of Python and of installed packages.
LIBRARIES = tuple(os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "purelib", "platlib"))
#: The directory of this package.
OWN_FILES = str(Path(__file__).parents[1]) + os.sep
#: Files whose functions only wrap methods, to check their arguments. Each file adds itself.
WRAPPERS = set[str]()


def is_in_this_package(module: object) -> bool:
    """Whether a module, given by its name, belongs to this package."""
    return str(module).partition(".")[0] == "pytorch_accel_lite"


def is_from_this_package(thing: object) -> bool:
    """Whether a class or a function belongs to this package, rather than to its user."""
    return is_in_this_package(getattr(thing, "__module__", ""))


def is_of_library(module: object) -> bool:
    """Whether a module, given by its name, belongs to this package, to Python or to an installed package."""
    file = getattr(sys.modules.get(str(module)), "__dict__", {}).get("__file__")
    return is_in_this_package(module) or (file is not None and os.path.realpath(file).startswith(LIBRARIES))


@lru_cache(maxsize=4096)
def is_installed(path: str) -> bool:
    """Whether a file belongs to Python, an installed package or this package, rather than to the user's program."""
    return os.path.realpath(path).startswith((*LIBRARIES, OWN_FILES)) or path.startswith("<frozen")


def is_overridden(instance: object, method: str) -> bool:
    """Whether a user overrides a method of this package, for an object.

    The user may override it in a class, or replace it in the object itself or in a class of this package. Values and
    properties of this package are not methods, and no name of the user's own is one of this package.
    """
    return any(callable(vars(kind).get(method)) for kind in _own_classes(instance)) and _is_replaced(instance, method)


def overridden_methods(instance: object) -> frozenset[str]:
    """Return the names of all methods of this package for which ``is_overridden()`` is true."""
    methods = {name for kind in _own_classes(instance) for name, value in vars(kind).items() if callable(value)}
    return frozenset(name for name in methods if _is_replaced(instance, name))


def _own_classes(instance: object) -> list[type]:
    return [kind for kind in type(instance).__mro__ if is_from_this_package(kind)]


def _is_replaced(instance: object, name: str) -> bool:
    """Whether an object, or its class, has something else in place of a method of this package."""
    of_class = getattr(type(instance), name)
    in_object = vars(instance).get(name)
    if callable(in_object) and getattr(in_object, "__func__", None) is not of_class:
        return True
    # A user's wrapper with functools.wraps() only says that it is from this package; one of torch says so rightly.
    written_in = getattr(of_class, "__globals__", {}).get("__name__", "")
    return not is_from_this_package(of_class) or not (is_in_this_package(written_in) or is_of_library(written_in))


def users_classes(instance: object) -> list[type]:
    """Return the classes of an object, its own first, that are neither Python's nor a library's."""
    return [kind for kind in type(instance).__mro__ if not is_of_library(kind.__module__)]


def checked_by(error: BaseException, *others: type[Exception]) -> str:
    """Return the module of this package whose check raised an error, or ``""``. Such an error needs no notes.

    Args:
        others: kinds of errors that count as well, beside those that most checks raise
    """
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    module = str(frame.f_globals.get("__name__"))
    is_check = isinstance(error, (ValueError, TypeError, RuntimeError, *others)) and is_in_this_package(module)
    return module if is_check else ""
