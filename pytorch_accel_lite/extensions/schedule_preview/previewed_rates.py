"""Previewing a schedule without training."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from pytorch_accel_lite.extension_tools.arguments_and_errors import check_function, check_positive_int
from pytorch_accel_lite.extension_tools.schedules import CreateScheduler, ScheduleName, SchedulerBase, resolve_names
from pytorch_accel_lite.placeholders import replace_trainer_placeholder_values


def _groups_of(lr: Any) -> Iterable[Any]:
    """Return the learning rate, or the options, of each parameter group."""
    rate: Any = lr.item() if getattr(lr, "ndim", 1) == 0 else lr  # of numpy or torch
    if isinstance(rate, (int, float)):
        return [rate]
    if isinstance(rate, str) or not isinstance(rate, Iterable):
        raise TypeError(f"lr={lr!r} must be a number, or a list with one for each parameter group.")
    return rate


def schedule_values(
    create_scheduler_fn: ScheduleName | CreateScheduler,
    num_updates: int,
    lr: float | Sequence[float | Mapping[str, float]] = 1.0,
    num_epochs: int = 1,
    warmup_steps: float = 0,
) -> list[list[float]]:
    """Return the learning rate at each update, for each parameter group.

    Args:
        create_scheduler_fn: as in ``train()``; placeholders in a ``functools.partial`` are resolved
        num_updates: number of optimizer updates in the run
        lr: learning rate of the optimizer; or a list with the learning rate, or a dict of options, of each parameter
            group
        num_epochs: number of epochs in the run
        warmup_steps: as in ``train()``, for a schedule by name
    """
    check_positive_int("num_updates", num_updates)
    check_positive_int("num_epochs", num_epochs)
    groups = [group if isinstance(group, Mapping) else {"lr": group} for group in _groups_of(lr)]
    create = check_function("create_scheduler_fn", resolve_names(create_scheduler_fn, warmup_steps))
    optimizer = torch.optim.SGD([{**group, "params": [torch.nn.Parameter(torch.zeros(1))]} for group in groups], lr=0)
    per_epoch = math.ceil(num_updates / num_epochs)
    trainer: Any = SimpleNamespace(
        run_config=SimpleNamespace(
            num_epochs=num_epochs,
            gradient_accumulation_steps=1,
            num_update_steps_per_epoch=per_epoch,
            max_num_train_steps=num_updates,
        ),
        train_dataloader=range(per_epoch),
        eval_dataloaders=[],
    )
    scheduler = replace_trainer_placeholder_values(trainer, create)(optimizer)
    is_timm = hasattr(scheduler, "step_update") and not isinstance(scheduler, SchedulerBase)
    curves: list[list[float]] = [[] for _ in groups]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch expects optimizer.step() first, which would do nothing here
        for update in range(1, num_updates + 1):
            for curve, group in zip(curves, optimizer.param_groups, strict=True):
                curve.append(float(group["lr"]))
            if is_timm:
                scheduler.step_update(update)
                if update % per_epoch == 0:
                    scheduler.step(update // per_epoch)
            elif update < num_updates:
                scheduler.step()
    return curves
