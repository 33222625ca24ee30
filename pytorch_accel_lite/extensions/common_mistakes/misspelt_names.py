"""Warnings of methods and events whose names are almost those of the package."""

from __future__ import annotations

from collections.abc import Iterable
from types import FunctionType

from pytorch_accel_lite.extending import TrainerCallback
from pytorch_accel_lite.extension_tools.arguments_and_errors import (
    did_you_mean,
    events_meant,
    is_from_this_package,
    is_overridden,
    suggest,
    warn_outside,
)
from pytorch_accel_lite.extension_tools.metrics_and_callbacks import EVENTS

#: The methods that "The training loop" in the documentation says to override.
_TO_OVERRIDE = (
    "create_train_dataloader",
    "create_eval_dataloader",
    "get_default_train_dl_kwargs",
    "get_default_eval_dl_kwargs",
    "create_scheduler",
    "training_run_start",
    "training_run_end",
    "training_run_epoch_end",
    "train_epoch_start",
    "train_epoch_end",
    "calculate_train_batch_loss",
    "backward_step",
    "clip_gradients",
    "optimizer_step",
    "scheduler_step",
    "optimizer_zero_grad",
    "eval_epoch_start",
    "calculate_eval_batch_loss",
    "eval_epoch_end",
    "evaluation_run_start",
    "evaluation_run_end",
    "calculate_predict_batch_output",
    "train_step",
    "advance_scheduler",
)


def warn_of_misspelt_methods(objects: Iterable[object]) -> None:
    """Warn of methods named almost like one to override, unless that is overridden, or another method names them."""
    for trainer in objects:
        kind = type(trainer)
        if not hasattr(kind, "calculate_train_batch_loss"):
            continue
        meant = [name for name in _TO_OVERRIDE if not is_overridden(trainer, name)]
        for name in _methods_that_nothing_names(kind):
            hint = did_you_mean(name, meant, cutoff=0.88)
            if hint:
                warn_outside(
                    f"{kind.__name__}.{name} is not a method of the trainer: it is called only if your program does."
                    f"{hint}"
                )


def _methods_that_nothing_names(kind: type) -> list[str]:
    """Return the methods that a user adds to the trainer, and that no method of the user's classes calls."""
    added = {name: f for one in kind.__mro__ if not is_from_this_package(one) for name, f in vars(one).items()}
    ours = {name for one in kind.__mro__ if is_from_this_package(one) for name in vars(one)}
    functions = {name: function for name, function in added.items() if isinstance(function, FunctionType)}
    named = {word for function in functions.values() for word in function.__code__.co_names}
    return [name for name in functions if name not in named | ours]


def warn_of_unknown_events(objects: Iterable[object]) -> None:
    """Warn of methods of callbacks that no event calls, although they are named like one."""
    for kind in dict.fromkeys(type(one) for one in objects if isinstance(one, TrainerCallback)):
        _warn_of_half_a_state(kind)
        for name in dir(kind):
            is_like_one = name not in EVENTS and (name.startswith("on_") or bool(events_meant(name)))
            method = getattr(kind, name) if is_like_one else None
            if callable(method) and not is_from_this_package(method):
                hint = suggest(name, [*EVENTS, "state_dict", "load_state_dict"], cutoff=0.88)
                if hint:
                    warn_outside(
                        f"{kind.__name__}.{name} is not an event of the trainer: it is called only if your program "
                        f"does.{hint}"
                    )


def _warn_of_half_a_state(kind: type[TrainerCallback]) -> None:
    saves, restores = hasattr(kind, "state_dict"), hasattr(kind, "load_state_dict")
    if saves != restores:
        has, lacks = ("state_dict()", "load_state_dict(state)")[:: 1 if saves else -1]
        warn_outside(f"{kind.__name__} has {has}, but no {lacks}, so a resumed run does not restore its state.")
