"""Checks of arguments: errors that name the argument and its value."""

from __future__ import annotations

import inspect
import math
import numbers
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")


def check_number(name: str, value: object, kind: type = numbers.Real, called: str = "a number") -> Any:
    """Return ``value`` if it is a number of this kind, otherwise raise an error that names the argument."""
    if isinstance(value, bool) or not isinstance(value, kind):
        raise TypeError(f"{name}={value!r} must be {called}, not {type(value).__name__}.")
    return value


def check_positive_int(name: str, value: object) -> int:
    """Return ``value`` if it is an integer of at least one, otherwise raise an error that names the argument."""
    return check_int(name, value, least=1)


def check_int(name: str, value: object, least: int) -> int:
    """Return ``value`` if it is an integer that is large enough, otherwise raise an error that names the argument."""
    number = int(check_number(name, value, numbers.Integral, "an integer"))
    if number < least:
        raise ValueError(f"{name}={value!r} must be at least {least}.")
    return number


def check_positive_number(name: str, value: object) -> float:
    """Return ``value`` as a float if it is positive, including infinity, otherwise raise an error."""
    number = float(check_number(name, value))
    if not number > 0:
        raise ValueError(f"{name}={value!r} must be greater than 0. Omit it for no limit.")
    return number


def check_range(name: str, value: object, most: float = math.inf, above: float | None = None) -> float:
    """Return ``value`` as a float if it is finite and within limits, otherwise raise an error naming the argument.

    Args:
        above: a limit that the number must exceed; by default, the number must be at least 0
    """
    number = float(check_number(name, value))
    large_enough = number >= 0 if above is None else number > above
    if not (large_enough and number <= most and math.isfinite(number)):
        limits = "at least 0" if above is None else f"greater than {above}"
        limits += f" and at most {most}" if math.isfinite(most) else ""
        raise ValueError(f"{name}={value!r} must be {limits}.")
    return number


def optional(check: Callable[[str, object], T], name: str, value: object) -> T | None:
    """Return ``None``, or a value that passes a check."""
    return None if value is None else check(name, value)


def check_choice(name: str, value: object, choices: Sequence[str]) -> str:
    """Return ``value`` if it is one of the choices, otherwise raise an error that names the argument and lists them."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} must be {' or '.join(map(repr, choices))}.")
    return str(value)


def check_names(name: str, value: object) -> list[str]:
    """Return ``value`` as a list if it holds names, otherwise raise an error that names the argument."""
    if isinstance(value, str):
        raise TypeError(f"{name}={value!r} must be a list of names. Write: {name}=[{value!r}].")
    names = list(value) if isinstance(value, Iterable) and getattr(value, "ndim", None) != 0 else None
    if names is None or not all(isinstance(each, str) for each in names):
        raise TypeError(f"{name}={value!r} must be a list of names.")
    return names


def check_dict(name: str, value: Any) -> dict[str, Any]:
    """Return a copy of a dict, empty for ``None``, or raise an error that names the argument."""
    try:
        return dict(value or {})
    except (TypeError, ValueError):
        hint = f" Pass vars({name})." if isinstance(value, Namespace) else ""
        raise TypeError(f"{name}={value!r} must be a dict, not {type(value).__name__}.{hint}") from None


def check_bool(name: str, value: T, may_be_none: bool = False) -> T:
    """Return ``value`` if it is a bool, of Python or numpy, or 0 or 1; otherwise, as for a string, raise an error."""
    is_valid = isinstance(value, (bool, np.bool_)) or (type(value) is int and value in (0, 1))
    if not (is_valid or (may_be_none and value is None)):
        expected = "True, False, or None" if may_be_none else "True or False"
        raise TypeError(f"{name}={value!r} must be {expected}, not {type(value).__name__}.")
    return value


def check_booleans(function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> None:
    """Check the arguments of a call that the function declares as ``bool`` or ``bool | None``."""
    signature, booleans = _booleans_of(function)
    if not booleans:
        return
    try:
        arguments = signature.bind(*args, **kwargs).arguments
    except TypeError:  # the call itself will say what is wrong
        return
    for name in booleans.keys() & arguments.keys():
        check_bool(name, arguments[name], booleans[name])


@cache
def _booleans_of(function: Callable[..., object]) -> tuple[inspect.Signature, dict[str, bool]]:
    """Return the signature of a function and, for each bool argument, whether it may be ``None``."""
    signature = inspect.signature(function)
    kinds = {"bool": False, "bool | None": True}  # annotations are strings here
    declared = {parameter.name: parameter.annotation for parameter in signature.parameters.values()}
    return signature, {name: kinds[kind] for name, kind in declared.items() if kind in kinds}


def refuse_class(name: str, value: object) -> None:
    """Raise a ``TypeError`` if an argument is a class in place of an instance."""
    if isinstance(value, type):
        raise TypeError(f"{name}={value!r} must be an instance, not a class: {value.__name__}(...).")
