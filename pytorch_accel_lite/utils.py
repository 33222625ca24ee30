"""Small helpers for all modules: argument checks, optional imports, texts, suggestions."""

from __future__ import annotations

import difflib
import importlib
import inspect
import math
import numbers
import os
import re
import shlex
import shutil
import sys
import sysconfig
import textwrap
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from pytorch_accel_lite.lazy import loaded_when_named

if TYPE_CHECKING:
    from pytorch_accel_lite.ema import ModelEma as ModelEma
    from pytorch_accel_lite.helpers import DataLoaderSlice as DataLoaderSlice
    from pytorch_accel_lite.helpers import LimitBatches as LimitBatches
    from pytorch_accel_lite.helpers import local_process_zero_first as local_process_zero_first
    from pytorch_accel_lite.helpers import local_process_zero_only as local_process_zero_only
    from pytorch_accel_lite.helpers import remove_padding as remove_padding
    from pytorch_accel_lite.helpers import worker_init_fn as worker_init_fn
    from pytorch_accel_lite.helpers import world_process_zero_only as world_process_zero_only

#: Where Python and what is installed for it are.
LIBRARIES = tuple(os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "purelib", "platlib"))
LIMIT_BATCHES_VARIABLE = LIMIT_BATCHES_ENV_VAR = "PT_ACC_LIMIT_BATCHES"  # the second name is the ancestor's


def is_ours(thing: object) -> bool:
    """Whether a class or a function belongs to this package, rather than to its user."""
    return str(getattr(thing, "__module__", "")).partition(".")[0] == __package__


def is_overridden(instance: object, method: str) -> bool:
    """Whether the user's own class overrides a method of ours."""
    return not is_ours(getattr(type(instance), method))


def accepts(function: Callable[..., Any], *arguments: Any) -> bool:
    """Whether a function can be called with these positional arguments."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # not written in Python
        return True
    return True


class TimeBudget:
    """Limits a recurring action, such as drawing a plot after each epoch, to a share of the time.

    :param share: maximum share of the time, from 0 to 1
    :param expected: approximate duration of the first time, in seconds
    """

    def __init__(self, share: float, expected: float) -> None:
        self._share = share
        self._next = time.monotonic() + expected / share

    @property
    def is_due(self) -> bool:
        """Whether the action may be done now."""
        return time.monotonic() >= self._next

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure the action in a block: the longer it takes, the longer until it is due again."""
        begin = time.monotonic()
        yield
        self._next = begin + (time.monotonic() - begin) / self._share


def format_metric(value: Any) -> str:
    """Format a value for display: floats, including numpy's and those in scalar tensors, with six digits."""
    if not isinstance(value, str) and hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def find_length(thing: Any) -> int | None:
    """Return ``len(thing)``, or ``None`` if it has no length."""
    try:
        return len(thing)
    except TypeError:
        return None


def distinct_elements(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of the elements that have memory of their own, as torch writes only to these; see ``expand``."""
    for dimension, stride in enumerate(tensor.stride() if tensor.layout is torch.strided else ()):
        if stride == 0 and tensor.shape[dimension] > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def check_number(name: str, value: Any, kind: type = numbers.Real, called: str = "a number") -> Any:
    """Return ``value`` if it is a number of this kind, otherwise raise an error that names the argument."""
    if isinstance(value, bool) or not isinstance(value, kind):
        raise TypeError(f"{name}={value!r} must be {called}, not {type(value).__name__}.")
    return value


def check_positive_int(name: str, value: object) -> int:
    """Return ``value`` if it is an integer of at least one, otherwise raise an error that names the argument."""
    number = int(check_number(name, value, numbers.Integral, "a whole number"))
    if number < 1:
        raise ValueError(f"{name}={value!r} must be at least 1.")
    return number


def check_positive_number(name: str, value: object) -> float:
    """Return ``value`` as a float if it is positive, including infinity, otherwise raise an error."""
    number = float(check_number(name, value))
    if not number > 0:
        raise ValueError(f"{name}={value!r} must be greater than 0. Omit it for no limit.")
    return number


def check_range(
    name: str, value: object, least: float = 0, most: float = math.inf, above: float | None = None
) -> float:
    """Return ``value`` as a float if it is finite and within limits, otherwise raise an error naming the argument.

    :param above: a limit that the number must exceed, instead of ``least``
    """
    number = float(check_number(name, value))
    large_enough = number >= least if above is None else number > above
    if not (large_enough and number <= most and math.isfinite(number)):
        limits = f"at least {least}" if above is None else f"greater than {above}"
        limits += f" and at most {most}" if math.isfinite(most) else ""
        raise ValueError(f"{name}={value!r} must be {limits}.")
    return number


def check_choice(name: str, value: object, choices: Sequence[str]) -> str:
    """Return ``value`` if it is one of the choices, otherwise raise an error that names the argument and lists them."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} must be {' or '.join(map(repr, choices))}.")
    return str(value)


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cores_per_process(processes: int) -> int:
    """Return the number of cores of this machine available to each process, at least one.

    :param processes: number of processes in the job, assumed to be on this machine unless the launcher tells otherwise
    """
    here = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    return max(available_cores() // max(here, 1), 1)


def in_notebook() -> bool:
    """Whether this program runs in an IPython kernel, rather than merely importing IPython."""
    ipython = sys.modules.get("IPython")
    return getattr(ipython and ipython.get_ipython(), "kernel", None) is not None


def is_terminal(stream: Any) -> bool:
    """Whether a stream is a terminal; ``None`` is not."""
    return bool(stream is not None and stream.isatty())


def wrapped(text: str, indent: str = "") -> str:
    """Wrap a text to the width of the terminal, or leave it in one line if the output is not a terminal.

    :param indent: prefix of all lines after the first
    """
    if not is_terminal(sys.stdout):
        return text
    columns = shutil.get_terminal_size().columns
    return textwrap.fill(text, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def import_extra(module: str, extra: str, purpose: str) -> ModuleType:
    """Import an optional dependency, or raise an ``ImportError`` with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = "pillow" if module.startswith("PIL") else module.partition(".")[0]
        raise ImportError(f"{purpose} needs {package}. Install it with: {install_command(extra, package)}") from error


def install_command(extra: str, package: str) -> str:
    """Return the command that installs the requirements of an extra of this package.

    It names the requirements rather than the extra: ``pip install 'pytorch-accel-lite[extra]'`` finds nothing, or
    another version, if this package was installed from a clone, a git URL or a file.

    :param package: the package to install if the extra is unknown, as in a checkout that was never installed
    """
    try:
        required = metadata.requires("pytorch-accel-lite") or []
    except metadata.PackageNotFoundError:
        required = []
    of_extra = re.compile(rf"""\bextra\s*==\s*["']{re.escape(extra)}["']""")
    brought = [line.partition(";")[0].strip() for line in required if of_extra.search(line)]
    return f"pip install {shlex.join(brought or [package])}"


def warn_of_metric_name(name: str) -> None:
    """Warn of a metric with the name of the column of epochs; code for the ancestor may record one."""
    if name == "epoch":
        warnings.warn(
            "The metric 'epoch' is left out of tables and files, whose column of epochs has this name. Record it under "
            "another name.",
            stacklevel=3,
        )


def warn_outside(message: str) -> None:
    """Warn at the innermost line outside this package: that of the user's call, however deep below it this is."""
    frame, level = sys._getframe(1), 2  # noqa: SLF001
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == __package__:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return ``" Did you mean 'x'?"`` for the closest of the known words, or an empty string if none is close."""
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f" Did you mean {matches[0]!r}?" if matches else ""


_HELPERS = (
    "DataLoaderSlice",
    "LimitBatches",
    "local_process_zero_first",
    "local_process_zero_only",
    "remove_padding",
    "worker_init_fn",
    "world_process_zero_only",
)
# The ancestor's users import them from here.
__getattr__ = loaded_when_named(
    __name__, {"ModelEma": "pytorch_accel_lite.ema", **dict.fromkeys(_HELPERS, "pytorch_accel_lite.helpers")}
)
