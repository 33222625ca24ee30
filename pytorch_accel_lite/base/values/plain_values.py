"""Values as plain numbers and texts, as JSON and other programs can hold them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pytorch_accel_lite.base.types import Tree


def to_number(value: object) -> Any:
    """Return a scalar of numpy or torch as a Python number; anything else unchanged."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else value


def as_plain(value: object) -> str | bool | float | None:
    """Return a value in a form for JSON and CSV files."""
    value = None if value is None else as_number_or_text(value)
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def as_json(value: object) -> Tree:
    """Return a nested value in a form for JSON: numbers and lists in place of tensors, and texts for all else."""
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    value = value.tolist() if hasattr(value, "tolist") else value
    return [as_json(item) for item in value] if isinstance(value, (list, tuple)) else as_plain(value)


def as_number_or_text(value: Any) -> str | bool | float:
    """Return a number, even in a tensor, as a Python number, and anything else as text."""
    if isinstance(value, (str, bool, int)):
        return value
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return str(value)


def is_number_text(text: str) -> bool:
    """Whether a text is a number, as ``-Infinity`` is."""
    try:
        float(text)
    except ValueError:
        return False
    return True
