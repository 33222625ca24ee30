"""Warnings about arguments that a program has assigned to the trainer, where they have no effect."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

from pytorch_accel_lite.extending import Run, TrainerCallback, TrainerLike
from pytorch_accel_lite.extension_tools.arguments_and_errors import (
    is_from_this_package,
    library_attributes,
    warn_outside,
)
from pytorch_accel_lite.extension_tools.texts_and_pages import listed


def warn_of_assignments(trainer: TrainerLike, run: Run) -> None:
    """Warn of attributes of the trainer that would have to be arguments. A subclass may have them for itself."""
    if run.ranks.rank != 0:
        return
    assigned = vars(trainer).keys() - library_attributes(trainer)
    if "callbacks" in assigned:
        _warn_of_callbacks(trainer, vars(trainer)["callbacks"])
    if not is_from_this_package(type(trainer)):
        return
    for name in sorted(assigned - {"callbacks"}):
        for method, called in (("__init__", "Trainer"), ("train", "train")):
            if name in inspect.signature(getattr(type(trainer), method)).parameters:
                warn_outside(f"trainer.{name} = ... has no effect. Pass {called}({name}=...).")
                break


def _warn_of_callbacks(trainer: TrainerLike, callbacks: object) -> None:
    """Warn of callbacks in ``trainer.callbacks`` that are not called."""
    called = list(trainer.callback_handler)
    ignored = [
        type(one).__name__
        for one in (callbacks if isinstance(callbacks, Iterable) else ())
        if isinstance(one, TrainerCallback) and one not in called
    ]
    if ignored:
        warn_outside(
            f"trainer.callbacks = [...] has no effect, so {listed(ignored)} will not be called. Add callbacks by "
            "trainer.callback_handler.add_callback(...), and remove them by remove_callback(...)."
        )
