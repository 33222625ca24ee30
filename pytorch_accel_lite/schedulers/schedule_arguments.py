"""The argument ``create_scheduler_fn``: functions, and names such as ``"cosine"``, for which an extension has them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, cast, get_args

from pytorch_accel_lite.base.slots import Slot
from pytorch_accel_lite.base.unknown_names import did_you_mean
from pytorch_accel_lite.optimizers.optimizer_parts import CreateScheduler, SchedulerFactory

#: The names that ``train(create_scheduler_fn=...)`` takes: ``"constant"``, ``"linear"``, ``"cosine"``, ``"wsd"``.
ScheduleName = Literal["constant", "linear", "cosine", "wsd"]
#: The values that ``train`` takes as ``create_scheduler_fn``.
ScheduleArgument = ScheduleName | SchedulerFactory | Mapping[str, ScheduleName | CreateScheduler]
#: Returns the factory that a name stands for, with a number of warm-up steps and the interval of a schedule's steps.
NAMED_SCHEDULES: Slot[Callable[[ScheduleName, float, str], CreateScheduler]] = Slot("named_schedules")


def resolve_names(
    create_scheduler_fn: object,
    warmup_steps: float = 0,
    interval: str = "update",
    argument: str = "create_scheduler_fn",
) -> Any:
    """Return the factory that a name stands for, also in a dict by optimizer; functions are returned unchanged.

    Args:
        warmup_steps: number of steps of linear warm-up; if less than 1, their fraction of the run
        interval: ``"update"`` or ``"epoch"``: when the schedule is stepped

    Raises:
        ValueError: for an unknown name, or a warm-up without a name
        TypeError: for a scheduler in place of a function
    """
    if isinstance(create_scheduler_fn, Mapping):
        return {
            key: resolve_names(value, warmup_steps, interval, f"{argument}[{key!r}]")
            for key, value in create_scheduler_fn.items()
        }
    if isinstance(create_scheduler_fn, str):
        _check_name(argument, create_scheduler_fn)
        by_name = NAMED_SCHEDULES.get(f"{argument}={create_scheduler_fn!r}")
        return by_name(cast(ScheduleName, create_scheduler_fn), warmup_steps, interval)
    if create_scheduler_fn is not None and not callable(create_scheduler_fn):
        kind = type(create_scheduler_fn).__name__
        example = f"{kind}, ..." if hasattr(create_scheduler_fn, "step") else "StepLR, step_size=10"
        raise TypeError(
            f"{argument}={create_scheduler_fn!r} must be a function that creates a scheduler from an optimizer, not "
            f"{kind}. For example: functools.partial({example})."
        )
    if warmup_steps != 0:
        instead = "Pass 'constant'" if create_scheduler_fn is None else "Give your own scheduler its warm-up"
        raise ValueError(
            f"warmup_steps={warmup_steps!r} is for schedules by name, but {argument}={create_scheduler_fn!r}. "
            f"{instead}, or choose one of {_schedule_names()}."
        )
    return create_scheduler_fn


def check_factory(create: CreateScheduler, argument: str = "create_scheduler_fn") -> None:
    """Check that a function can be called with an optimizer as its only argument."""
    function = create.func if isinstance(create, partial) else create
    name = getattr(function, "__name__", type(function).__name__)
    try:
        first, *others = [*inspect.signature(function).parameters, ""]
        inspect.signature(create).bind(object())
    except ValueError:  # the function is not written in Python
        return
    except TypeError as error:
        lacks = str(error).startswith("missing")
        remedy = f"Pass the others by functools.partial({name}, name=value)." if lacks else "Let it take the optimizer."
        raise TypeError(f"{argument}={name} is called with the optimizer alone: {error}. {remedy}") from None
    if isinstance(create, partial) and create.args and first == "optimizer":
        passed = ", ".join(map(repr, create.args))
        raise TypeError(
            f"{argument}=functools.partial({name}, {passed}) passes {create.args[0]!r} as the optimizer, which comes "
            f"first. Name the arguments: functools.partial({name}, {others[0]}=...)."
        )


def _check_name(argument: str, name: str) -> None:
    if name not in get_args(ScheduleName):
        raise ValueError(
            f"{argument}={name!r} is not the name of a schedule.{did_you_mean(name, get_args(ScheduleName), 0.5)} "
            f"Choose from {_schedule_names()}, or pass a function such as functools.partial(StepLR, step_size=10)."
        )


def _schedule_names() -> str:
    return ", ".join(map(repr, get_args(ScheduleName)))
