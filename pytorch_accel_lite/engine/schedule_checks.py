"""Checks of a run's scheduler: what creates it, how it is stepped, and how long it is."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau

from pytorch_accel_lite.base.inspection import accepts, is_overridden
from pytorch_accel_lite.base.placeholders import Placeholder
from pytorch_accel_lite.base.protocols import TrainerLike
from pytorch_accel_lite.engine.arguments import by_name
from pytorch_accel_lite.optimizers.operations import follows_metric, schedulers_in

if TYPE_CHECKING:
    from pytorch_accel_lite.base.run_settings import RunRequest
    from pytorch_accel_lite.engine.run import Run


def check_scheduler_factory(create_scheduler_fn: Any, optimizer: Any) -> None:
    """Check that a scheduler class needs no arguments besides the optimizer.

    :raises TypeError: if it needs more
    """
    for name, create in by_name("create_scheduler_fn", create_scheduler_fn):
        if isinstance(create, type) and not accepts(create, optimizer):
            kind = create.__name__
            parameters = list(inspect.signature(create).parameters.values())[1:]
            needed = ", ".join(f"{p.name}=..." for p in parameters if p.default is p.empty)
            raise TypeError(
                f"{name}={kind} is called with the optimizer only. Pass functools.partial({kind}, {needed})."
            )


def check_scheduler(scheduler: Any, request: RunRequest, create_scheduler_fn: Any, steps_itself: bool) -> None:
    """Check that a scheduler can be stepped, and is given a metric if and only if it takes one.

    :param create_scheduler_fn: the function that created it; ``None`` if an overridden ``create_scheduler`` did, which
        may return no scheduler
    :param steps_itself: whether an overridden method steps the scheduler
    """
    interval = request.scheduler_interval
    metric = request.scheduler_metric
    parts = schedulers_in(scheduler)
    must_have_step = create_scheduler_fn is not None or (scheduler is not None and not steps_itself)
    for name, part in parts.items() if must_have_step else ():
        if not hasattr(part, "step"):
            create = create_scheduler_fn[name] if name else create_scheduler_fn
            given = "create_scheduler_fn" + (f"[{name!r}]" if name else "")
            source = "create_scheduler()" if create is None else f"{given}={create!r}"
            raise TypeError(
                f"{source} returned {part!r}, which is not a scheduler: it has no step(). Return a scheduler created "
                "from the optimizer."
            )
    if scheduler is None:
        if (interval, metric) != ("update", None):
            name, value = ("scheduler_interval", interval) if metric is None else ("scheduler_metric", metric)
            raise ValueError(f"{name}={value!r} needs a scheduler. Pass create_scheduler_fn, or omit it.")
        return
    groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", ())
    held = [getattr(part, "__dict__", {}) for part in parts.values()]
    _refuse_placeholders(type(scheduler).__name__, [*groups, *held])
    if steps_itself:
        return
    if metric is not None and not any(map(follows_metric, parts.values())):
        kinds = " and ".join(f"{type(part).__name__}.step" for part in parts.values())
        raise ValueError(f"scheduler_metric={metric!r}: {kinds} takes no metric, unlike ReduceLROnPlateau's. Omit it.")
    for part in parts.values():
        _check_stepped(part, request)


def _check_stepped(scheduler: Any, request: RunRequest) -> None:
    """Check that a scheduler can be stepped in the way the run will step it."""
    metric = request.scheduler_metric
    kind = type(scheduler).__name__
    if metric is None and hasattr(scheduler, "step_update") and not accepts(scheduler.step):
        raise TypeError(
            f"create_scheduler_fn returned {kind}, which is stepped with the number of the epoch, like timm's "
            "schedulers. Use TrainerWithTimmScheduler instead of Trainer, or override scheduler_step."
        )
    if metric is None and isinstance(scheduler, ReduceLROnPlateau):
        raise ValueError(
            f"{kind} follows a metric. Specify it, for example with scheduler_interval='epoch' and "
            "scheduler_metric='eval_loss_epoch', or override scheduler_step."
        )
    better = request.metrics.directions.get(metric or "")
    if better is not None and getattr(scheduler, "mode", None) == ("min" if better else "max"):
        raise ValueError(
            f"scheduler_metric={metric!r}: {'greater' if better else 'smaller'} values of this metric are better, but "
            f"{kind} has mode={scheduler.mode!r}. Create it with mode={'max' if better else 'min'!r}."
        )


def check_length(trainer: TrainerLike, run: Run) -> None:
    """Check that a schedule that cannot be stepped beyond its end is at least as long as the run."""
    config = run.required_config
    asked = config.max_num_train_steps if run.request.scheduler_interval == "update" else config.num_epochs
    if is_overridden(trainer, "scheduler_step") or asked is None:
        return
    advice = (
        "Pass total_steps=TrainerPlaceholderValues.MAX_NUM_TRAIN_STEPS (NUM_EPOCHS with scheduler_interval='epoch')."
    )
    if run.resumed is not None and not run.schedule.is_recreated:
        advice = (
            "It is the schedule of the run that is resumed, which is as long as that run. Train the longer run from "
            "the beginning; or load the weights of the state with trainer.load_checkpoint('<state>/model.safetensors') "
            "and start a new schedule: both without resume_from."
        )
    for scheduler in schedulers_in(trainer.scheduler).values():
        if isinstance(scheduler, OneCycleLR) and scheduler.total_steps < asked:
            raise ValueError(
                f"OneCycleLR has total_steps={scheduler.total_steps}, but the run steps it {asked} times, and it "
                f"cannot be stepped beyond its end. {advice}"
            )


def _refuse_placeholders(kind: str, values: Iterable[dict[str, Any]]) -> None:
    for held in values:
        for name, value in held.items():
            if isinstance(value, Placeholder):
                raise TypeError(
                    f"{kind} has {name}={value!r}, a placeholder that was not replaced. Placeholders are replaced "
                    "among the arguments of a functools.partial, not inside a function: pass it as an argument, as in "
                    "lr_lambda=partial(my_rate, total=TrainerPlaceholderValues.MAX_NUM_TRAIN_STEPS)."
                )
