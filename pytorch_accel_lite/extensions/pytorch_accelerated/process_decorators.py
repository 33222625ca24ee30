"""Decorators for functions that only one process runs, per machine or job, or that one runs before the others."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from pytorch_accel_lite.extension_tools.processes import current_process

P = ParamSpec("P")
R = TypeVar("R")


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
