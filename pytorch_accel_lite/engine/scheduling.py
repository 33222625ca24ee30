"""The learning rate schedule of a run, and the rates from which it starts."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau

from pytorch_accel_lite.base.inspection import accepts, is_overridden
from pytorch_accel_lite.base.placeholders import Placeholder, replace_trainer_placeholder_values
from pytorch_accel_lite.base.protocols import TrainerLike
from pytorch_accel_lite.engine.arguments import by_optimizer
from pytorch_accel_lite.engine.run import Run
from pytorch_accel_lite.optimizers.combined import create_schedulers
from pytorch_accel_lite.optimizers.operations import SchedulerFactory, follows_metric, schedulers_in
from pytorch_accel_lite.optimizers.rates import Options, initial_options, scheduled_options, set_options

if TYPE_CHECKING:
    from pytorch_accel_lite.base.run_settings import RunRequest
    from pytorch_accel_lite.engine.run import Run


def begin_schedule(trainer: TrainerLike, run: Run, check: Callable[[RunRequest], None]) -> None:
    """Create the scheduler of a run, if it has one, starting from the optimizer's initial rates.

    :param check: validates the run; if it raises an error, the optimizer keeps its rates
    """
    optimizer = trainer.optimizer
    run.schedule.rates_left = [] if run.before is None else run.before.schedule.rates_left
    now = scheduled_options(optimizer)
    initial = initial_options(optimizer, run.schedule.rates_left)
    trainer.scheduler = None
    try:
        begins = _create(trainer, now, initial)
        check(run.request)
    except Exception:
        set_options(optimizer, now)
        raise
    if begins and trainer.scheduler is not None:
        run.schedule.initial_options = initial
    if begins and run.resumed is None:
        _say_where_it_begins(trainer, *([values.get("lr") for values in options] for options in (now, initial)))


def _create(trainer: TrainerLike, now: Options, initial: Options) -> bool:
    """Create the scheduler, and return whether it starts afresh rather than continuing an earlier one."""
    optimizer = trainer.optimizer
    if trainer.create_scheduler_fn is not None or is_overridden(trainer, "create_scheduler"):
        had_schedule = all("initial_lr" in group for group in optimizer.param_groups)
        try:
            trainer.scheduler = create_from(trainer, initial)
        except KeyError as error:  # with last_epoch, the schedule continues from the current rates
            if not had_schedule or "initial_lr" not in str(error):
                raise
            set_options(optimizer, now)
            trainer.scheduler = trainer.create_scheduler()
            return False
    if trainer.scheduler is None:
        set_options(optimizer, now)
    return True


def create_with(trainer: TrainerLike, create: SchedulerFactory) -> Any:
    """Return the scheduler of a trainer's optimizer, or those of several, with placeholders replaced."""
    check_scheduler_factory(create, trainer.optimizer)
    create = replace_trainer_placeholder_values(trainer, create)
    return create_schedulers(create, trainer.optimizer) if isinstance(create, Mapping) else create(trainer.optimizer)


def step_after_epoch(trainer: TrainerLike, run: Run) -> None:
    """Step a per-epoch scheduler; one that follows a metric is stepped only after an evaluation.

    If evaluations do not follow epochs, it gets the latest value.
    """
    request = run.request
    each_epoch = trainer.scheduler is not None and request.scheduler_interval == "epoch"
    has_metric = request.scheduler_metric is None or run.evaluation_is_due or not run.data.all_eval_loaders
    has_metric = has_metric or request.eval_every_n_epochs is None
    if each_epoch and has_metric:
        trainer.scheduler_step()


def create_from(trainer: TrainerLike, options: Options) -> Any:
    """Create a scheduler for an optimizer with these options and no traces of an earlier schedule."""
    groups = trainer.optimizer.param_groups
    set_options(trainer.optimizer, options)
    traces = [group.pop("initial_lr", None) for group in groups]
    scheduler = None
    try:
        scheduler = trainer.create_scheduler()
    except TypeError as error:
        if trainer.create_scheduler_fn is not None or str(error) != "'NoneType' object is not callable":
            raise
        warnings.warn(
            f"{type(trainer).__name__}.create_scheduler() calls create_scheduler_fn, which was not passed to train(): "
            "this run has no scheduler.",
            stacklevel=6,  # the call of train()
        )
    finally:
        for group, values, trace in zip(groups, options, traces, strict=True):
            if "lr" in values and (scheduler is not None or trace is not None):
                group.setdefault("initial_lr", values["lr"])
    return scheduler


def _say_where_it_begins(trainer: TrainerLike, now: list[Any], initial: list[Any]) -> None:
    if now == initial:
        return
    if trainer.scheduler is None:
        trainer.print(
            f"This run has no scheduler and trains at the learning rate {_listed(now)}, left over from an earlier "
            f"schedule; the optimizer started at {_listed(initial)}. To return to that: for group in "
            "trainer.optimizer.param_groups: group['lr'] = group['initial_lr']"
        )
    else:
        trainer.print(
            f"The schedule starts from the optimizer's initial learning rate, {_listed(initial)}, not from the "
            f"{_listed(now)} left over from an earlier schedule."
        )


def _listed(rates: list[Any]) -> str:
    return ", ".join(dict.fromkeys("none" if rate is None else f"{rate:.3g}" for rate in rates))


def check_scheduler_factory(create_scheduler_fn: Any, optimizer: Any) -> None:
    """Check that a scheduler class needs no arguments besides the optimizer.

    :raises TypeError: if it needs more
    """
    for name, create in by_optimizer("create_scheduler_fn", create_scheduler_fn).items():
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
