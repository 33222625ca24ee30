"""Whether greater or smaller values of a metric are better, and by how much one is better than another."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import TypeVar

Key = TypeVar("Key")


def is_loss(name: str) -> bool:
    """Whether a metric is a loss by its name: a word that ends with "loss", as in "eval_loss_epoch" and "logloss"."""
    words = re.findall("[A-Z]?[a-z]+|[A-Z]+", name)
    return any(re.search("(?<!^[gf])loss(es)?$", word.lower()) for word in words)


def direction_in_words(greater_is_better: bool | None) -> str:
    """Return the direction of a metric for a message."""
    return "greater is better" if greater_is_better else "smaller is better"


def improvement(value: float, on: float | None, greater_is_better: bool | None) -> float:
    """Return by how much a value is better than another one; negative if it is worse, NaN if either is.

    Args:
        on: the other value; ``None`` if there is none yet, on which any finite value is an improvement
    """
    if on is None:
        return math.inf if math.isfinite(value) else -math.inf
    return value - on if greater_is_better else on - value


def best_first(items: Iterable[tuple[Key, float]], greater_is_better: bool | None) -> list[tuple[Key, float]]:
    """Return values with their names, the best one first."""
    return sorted(items, key=lambda item: item[1], reverse=bool(greater_is_better))
