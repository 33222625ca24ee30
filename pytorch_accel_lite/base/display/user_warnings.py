"""Warnings at the line of the user's program that they are about."""

from __future__ import annotations

import sys
import warnings

from pytorch_accel_lite.base.user_code import is_in_this_package


def warn_outside(message: str) -> None:
    """Warn at the innermost line outside this package, from which the user called it."""
    frame, level = sys._getframe(1), 2  # noqa: SLF001
    while frame.f_back is not None and is_in_this_package(frame.f_globals.get("__name__")):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
