"""Decorators for functions that only one process runs, per machine or job, or that one runs before the others."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from accelerate import PartialState
from accelerate.utils import parse_flag_from_env

from pytorch_accel_lite.base.machine.devices import launched_on_cpus

P = ParamSpec("P")
R = TypeVar("R")


def current_process() -> PartialState:
    """Return the state of this process, consistent with an ``Accelerator`` that may be created later."""
    return PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU") or launched_on_cpus())


def _only_where(attribute: str, func: Callable[P, R]) -> Callable[P, R | None]:
    @wraps(func)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R | None:
        return func(*args, **kwargs) if getattr(current_process(), attribute) else None

    return wrapper


def local_process_zero_only(func: Callable[P, R]) -> Callable[P, R | None]:
    """Decorate a function to run on only one process of each machine; the others return ``None`` immediately."""
    return _only_where("is_local_main_process", func)


def world_process_zero_only(func: Callable[P, R]) -> Callable[P, R | None]:
    """Decorate a function to run on only one process of the job; the others return ``None`` immediately."""
    return _only_where("is_main_process", func)


def local_process_zero_first(func: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function, such as a download, to run first on one process of each machine. All must call it."""

    @wraps(func)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        state = current_process()
        if not state.is_local_main_process:
            state.wait_for_everyone()
        try:
            return func(*args, **kwargs)
        finally:
            if state.is_local_main_process:
                state.wait_for_everyone()

    return wrapper
