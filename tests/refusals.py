"""What tests of invalid arguments and outputs share."""

from __future__ import annotations

import inspect
from typing import Any

from pytorch_accel_lite import Trainer

#: What errors say of a number that is none, or a fraction.
WHOLE = "must be an integer"


def returning(change: Any) -> type[Trainer]:
    """A trainer whose steps return ``change(output)`` in place of their output."""

    class Returning(Trainer):
        def calculate_train_batch_loss(self, batch):
            return change(super().calculate_train_batch_loss(batch))

        def calculate_eval_batch_loss(self, batch):
            return change(super().calculate_eval_batch_loss(batch))

    return Returning


def booleans_of(function: Any) -> list[str]:
    """The arguments of a function that are declared as booleans."""
    declared = inspect.signature(function).parameters.values()
    return [p.name for p in declared if p.annotation in ("bool", "bool | None")]
