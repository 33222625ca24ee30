"""Checks of arguments; errors, notes and warnings; whose code something is, and what arguments are for."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any, TypeVar

from torch import nn

from pytorch_accel_lite.base.arguments import (
    arguments_of,
    check_bool,
    check_choice,
    check_dict,
    check_int,
    check_names,
    check_number,
    check_positive_int,
    check_positive_number,
    check_range,
    checked_calls,
    library_attributes,
    optional,
    refuse_class,
)
from pytorch_accel_lite.base.missing_extensions import missing_extension_text
from pytorch_accel_lite.base.optional_packages import install_command
from pytorch_accel_lite.base.paths import is_place, parse_location
from pytorch_accel_lite.base.unknown_names import did_you_mean, events_meant, our_names
from pytorch_accel_lite.base.user_code import (
    checked_by,
    is_from_this_package,
    is_in_this_package,
    is_overridden,
    users_classes,
)
from pytorch_accel_lite.base.warnings_and_errors import add_note, notes_of, warn_outside

__all__ = [
    "add_note", "arguments_of", "check_bool", "check_choice", "check_dict", "check_function", "check_int",
    "check_module", "check_names", "check_number", "check_positive_int", "check_positive_number", "check_range",
    "check_text", "checked_by", "checked_calls", "describe_error", "did_you_mean", "events_meant", "install_command",
    "is_from_this_package", "is_in_this_package", "is_overridden", "library_attributes", "may_differ",
    "missing_extension_text", "notes_of", "optional", "parse_location", "suggest", "users_classes",
    "warn_outside",
]  # fmt: skip

F = TypeVar("F", bound=Callable[..., Any])

#: Names of arguments for devices, parts of a job, and data.
_ELSEWHERE = re.compile(
    r"(.*_)?(devices?|dtype|rank|replicas|world_size|epoch|verbose)|data_source|dataset|mixture|generator"
)


def may_differ(argument: str) -> bool:
    """Return whether an argument, by its name, may differ in a resumed run, as a place or a device may."""
    return is_place(argument) or _ELSEWHERE.fullmatch(argument) is not None


def describe_error(error: Exception) -> str:
    """Return the class and the first line of an error."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[-1] if 'Original Traceback' in str(error) else lines[0]}"


def check_text(name: str, value: object) -> str:
    """Return ``value`` if it is a string that is not empty, otherwise raise an error that names the argument."""
    if not isinstance(value, str) or not value:
        raise TypeError(f"{name}={value!r} must be a string that is not empty.")
    return value


def check_module(name: str, value: object) -> nn.Module:
    """Return ``value`` if it is a module, otherwise, as for its parameters, raise an error that names the argument."""
    refuse_class(name, value)
    if not isinstance(value, nn.Module):
        raise TypeError(f"{name}={value!r} must be a torch.nn.Module, not {type(value).__name__}.")
    return value


def check_function(name: str, value: F) -> F:
    """Return ``value`` if it can be called, otherwise raise an error that names the argument."""
    if not callable(value):
        raise TypeError(f"{name}={value!r} must be a function, not {type(value).__name__}.")
    return value


def suggest(word: str, existing: Collection[str], cutoff: float = 0.6) -> str:
    """Return ``" Did you mean 'x'?"`` for the name that other libraries call ``word``, or a similar one, or nothing.

    Args:
        cutoff: how similar a word must be, from 0 to 1
    """
    ours = [ours for ours in our_names(word) if ours in existing]
    return f" Did you mean {' or '.join(map(repr, ours))}?" if ours else did_you_mean(word, existing, cutoff)
