"""Errors about what a missing extension would offer: names of the package, methods of trainers, arguments."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn, TypeVar

from pytorch_accel_lite.extension_names import OFFERED, VARIABLES

C = TypeVar("C", bound=type)

_PACKAGE = Path(__file__).parents[1].name


def missing_name_error(name: str, prefix: str = "") -> Exception:
    """Return the error about a missing name in the package, or in ``prefix`` in it.

    If a missing extension has the name of a module, it is an ``ImportError``: ``from ... import`` would replace the
    message of an ``AttributeError``.
    """
    kind = AttributeError if prefix[:1].isupper() else ImportError
    qualified = f"{prefix}.{name}" if prefix else name
    for extension, names in OFFERED.items():
        if qualified in names:
            return kind(f"{qualified} {missing_extension_text(extension)}")
    owner = f"{prefix!r} object" if prefix[:1].isupper() else f"module {f'{_PACKAGE}.{prefix}'.rstrip('.')!r}"
    return AttributeError(f"{owner} has no attribute {name!r}")


def add_missing_name_errors(module: str) -> None:
    """Give a module at a public path errors for the names that it lacks because an extension is missing.

    It sets the module's ``__getattr__``. If the module declared one, a type checker would accept any name.
    """

    def raise_error(name: str) -> NoReturn:
        raise missing_name_error(name, module.removeprefix(_PACKAGE).lstrip("."))

    vars(sys.modules[module])["__getattr__"] = raise_error


class _MissingMethod:
    """Stands for a method from a missing extension."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __get__(self, instance: object, owner: type) -> object:
        raise AttributeError(str(self._error))


def add_missing_method_errors(cls: C) -> C:
    """Give a class errors for the methods that it lacks because an extension is missing.

    A ``__getattr__`` would make each attribute of each instance slower to read, and hide the errors of properties.
    """
    for name in [name for names in OFFERED.values() for name in names]:
        prefix, _, method = name.rpartition(".")
        if prefix == cls.__name__ and not hasattr(cls, method):
            setattr(cls, method, _MissingMethod(missing_name_error(method, prefix)))
    return cls


def check_environment() -> None:
    """Raise an error if an environment variable asks for something that a missing extension would do."""
    for variable, extension in VARIABLES.items():
        is_missing = f"{_PACKAGE}.extensions.{extension}" not in sys.modules
        if is_missing and (value := os.environ.get(variable, "none")) not in ("none", "0"):
            raise ValueError(f"{variable}={value} {missing_extension_text(extension)}")


def missing_extension_text(extension: str) -> str:
    """Return the end of an error about a missing extension, which begins with the name that needs it."""
    return (
        f"belongs to the extension {extension!r}, which is not installed: its folder "
        f"{_PACKAGE}/extensions/{extension} is missing. Reinstall the package."
    )
