"""Small helpers that every room may import: argument checks, optional imports, suggestions."""

from __future__ import annotations

import difflib
import importlib
import math
import numbers
import os
from collections.abc import Iterable
from types import ModuleType

LIMIT_BATCHES_VARIABLE = "PT_ACC_LIMIT_BATCHES"


class LimitBatches:
    """Trainers that are made within a ``with LimitBatches(n):`` block read at most n batches of any data.

    :param num_batches: batches that each process reads in an epoch and in an evaluation
    """

    def __init__(self, num_batches: int) -> None:
        self.num_batches = check_positive_int("num_batches", num_batches)
        self._before: str | None = None

    def __enter__(self) -> LimitBatches:
        self._before = os.environ.get(LIMIT_BATCHES_VARIABLE)
        os.environ[LIMIT_BATCHES_VARIABLE] = str(self.num_batches)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            del os.environ[LIMIT_BATCHES_VARIABLE]
        else:
            os.environ[LIMIT_BATCHES_VARIABLE] = self._before


def check_positive_int(name: str, value: object) -> int:
    """Return ``value`` when it is an integer of at least one, else raise an error that names the argument."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name}={value!r} must be a whole number, not {type(value).__name__}.")
    if value < 1:
        raise ValueError(f"{name}={value!r} must be at least 1.")
    return int(value)


def check_positive_number(name: str, value: object) -> float:
    """Return ``value`` as a float when it is a number above zero, else raise an error naming the argument."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}={value!r} must be a number, not {type(value).__name__}.")
    if not float(value) > 0:
        raise ValueError(f"{name}={value!r} must be greater than 0. Leave it out for no limit.")
    return float(value)


def import_extra(module: str, extra: str, purpose: str) -> ModuleType:
    """Import an optional dependency, or raise an ``ImportError`` that names the extra which brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(
            f"{purpose} needs {package}. Install it with: pip install 'pytorch-accel-lite[{extra}]'"
        ) from error


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return ``" Did you mean 'x'?"`` for the closest of the known words, or nothing when none is close."""
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f" Did you mean {matches[0]!r}?" if matches else ""


def check_range(
    name: str, value: object, least: float = 0, most: float = math.inf, above: float | None = None
) -> float:
    """Return ``value`` as a float when it is a number within limits, else raise an error naming the argument.

    :param above: a limit that the number must exceed, instead of ``least``
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}={value!r} must be a number, not {type(value).__name__}.")
    number = float(value)
    large_enough = number >= least if above is None else number > above
    if not (large_enough and number <= most and math.isfinite(number)):
        limits = f"at least {least}" if above is None else f"greater than {above}"
        limits += f" and at most {most}" if math.isfinite(most) else ""
        raise ValueError(f"{name}={value!r} must be {limits}.")
    return number
