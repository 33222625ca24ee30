"""What is said of a metric that is watched, but never recorded."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from pytorch_accel_lite.utils import did_you_mean

if TYPE_CHECKING:
    from pytorch_accel_lite.checks.expected_metrics import Directions


def refuse(where: object, name: str, reason: str, directions: Directions, others: list[str], warns: bool) -> None:
    """Raise an error for a metric that is never recorded, or warn if a user-defined class might record it.

    :param warns: whether this process is the one that warns
    """
    hint = reason or did_you_mean(name, directions, cutoff=0.85 if others else 0.6)
    if not others:
        known = "" if reason else f" It records: {', '.join(directions)}."
        raise ValueError(f"{where}: the run will not record it.{hint}{known}")
    if hint and warns:
        warnings.warn(
            f"{where}: the run will not record it, unless {' or '.join(dict.fromkeys(others))} does.{hint}",
            stacklevel=7,  # the call of train()
        )
