"""Warnings about rates that have no effect, and rates that an earlier schedule has left over."""

from __future__ import annotations

import inspect

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR

from pytorch_accel_lite.extending import Run, TrainerLike
from pytorch_accel_lite.extension_tools.arguments_and_errors import warn_outside
from pytorch_accel_lite.extension_tools.optimizers_and_gradients import (
    Options,
    format_rates,
    scheduled_options,
    schedulers_in,
)
from pytorch_accel_lite.extension_tools.texts_and_pages import to_number, wrapped


def check_rates(trainer: TrainerLike, run: Run, initial: Options | None) -> None:
    """Name rates of the optimizer that a schedule replaces, that an earlier schedule has left, or that nothing scales.

    Args:
        initial: see ``RunChecks.of_schedule``
    """
    if initial is not None and trainer.scheduler is None:
        _print_leftover_rates(trainer, initial)
    elif initial is not None:
        _print_unused_rates(trainer, initial)
    if run.ranks.rank == 0 and any("lr_scale" in group for group in trainer.optimizer.param_groups):
        _warn_of_unused_scales(trainer)


def _warn_of_unused_scales(trainer: TrainerLike) -> None:
    """Warn if nothing applies the ``lr_scale`` that timm's layer decay has put into parameter groups."""
    schedulers = schedulers_in(trainer.scheduler).values()
    applies = any(
        getattr(type(part), "applies_lr_scale", False) or hasattr(part, "update_groups") for part in schedulers
    )
    if applies or not _has_unused_scales(trainer.optimizer):
        return
    kind = "no scheduler" if trainer.scheduler is None else f"{type(trainer.scheduler).__name__}, which is not known to"
    warn_outside(
        "The optimizer's parameter groups have different lr_scale, as timm's layer decay sets them, but the same "
        f"learning rate: only some schedulers apply it, and the run has {kind}. Pass a schedule by name, such as "
        "create_scheduler_fn='constant', or use TrainerWithTimmScheduler; or multiply the rates before training: for "
        "group in optimizer.param_groups: group['lr'] *= group['lr_scale']"
    )


def _print_leftover_rates(trainer: TrainerLike, initial: Options) -> None:
    """Name the learning rates of a run without a scheduler, if an earlier schedule has left them over."""
    now = scheduled_options(trainer.optimizer)
    if now != initial:
        current, first = ([values.get("lr") for values in options] for options in (now, initial))
        trainer.print(
            f"This run has no scheduler and trains at the learning rate {format_rates(current)}, left over from "
            f"an earlier schedule; the optimizer started at {format_rates(first)}. To return to that: for group "
            "in trainer.optimizer.param_groups: group['lr'] = group['initial_lr']"
        )


def _print_unused_rates(trainer: TrainerLike, initial: Options) -> None:
    """Name the learning rates that the user gave an optimizer, if a schedule with its own rates replaces them."""
    groups = trainer.optimizer.param_groups
    rates = {id(group): values.get("lr") for group, values in zip(groups, initial, strict=True)}
    for scheduler in schedulers_in(trainer.scheduler).values():
        if not isinstance(scheduler, (OneCycleLR, CyclicLR)):
            continue
        optimizer = scheduler.optimizer
        default = inspect.signature(type(optimizer)).parameters.get("lr")
        groups = optimizer.param_groups
        highest = scheduler.max_lrs if isinstance(scheduler, CyclicLR) else [group["max_lr"] for group in groups]
        used = [*highest, *scheduler.base_lrs, *([default.default] if default else [])]
        # Rates in tensors are rounded, so rates are compared as they are shown.
        as_shown = {format_rates([rate]) for rate in used if isinstance(rate, (int, float, torch.Tensor))}
        unused = [rate for group in groups if format_rates([rate := rates.get(id(group))]) not in {"none", *as_shown}]
        if unused:
            message = (
                f"The optimizer's learning rate {format_rates(unused)} has no effect: {type(scheduler).__name__} sets "
                f"rates of its own, up to max_lr={format_rates(highest)}. Pass the rate that you want as max_lr, and "
                "leave out lr."
            )
            trainer.print(wrapped(message))


def _has_unused_scales(optimizer: Optimizer) -> bool:
    """Whether groups of different ``lr_scale`` train at the same rate, so that nothing has applied it.

    In a warm-up from 0, the initial rates are compared.
    """
    scales: dict[float, float] = {}
    for group in optimizer.param_groups:
        rate = to_number(group.get("lr")) or group.get("initial_lr")
        if rate and "lr_scale" in group and scales.setdefault(rate, group["lr_scale"]) != group["lr_scale"]:
            return True
    return False
