"""Scalars of other libraries as plain numbers."""

from __future__ import annotations

from typing import Any


def to_number(value: object) -> Any:
    """Return a scalar of numpy or torch as a Python number; anything else unchanged."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else value
