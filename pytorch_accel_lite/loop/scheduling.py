"""The scheduler of a run: checks of its schedule, and creating it from the initial rates of the optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

from torch.optim.lr_scheduler import OneCycleLR

from pytorch_accel_lite.base.display import short_repr
from pytorch_accel_lite.base.warnings_and_errors import warn_outside
from pytorch_accel_lite.loop.guards.same_on_all_ranks import check_same_on_all_ranks, kinds_of_schedulers
from pytorch_accel_lite.optimizers.combined_optimizers import create_schedulers
from pytorch_accel_lite.optimizers.optimizer_parts import (
    SchedulerFactory,
    SchedulerLike,
    TrainerScheduler,
    follows_metric,
    parts_of_optimizer,
    schedulers_in,
)
from pytorch_accel_lite.optimizers.scheduled_options import (
    Options,
    initial_options,
    names_of_initial,
    noted_options,
    scheduled_options,
    set_options,
)
from pytorch_accel_lite.run.notes_and_checks_seam import RUN_CHECKS
from pytorch_accel_lite.run.request_and_config import RunRequest
from pytorch_accel_lite.run.run import Run, TrainerLike
from pytorch_accel_lite.run.trained_objects import other_optimizers
from pytorch_accel_lite.run.training_state import TrainingState
from pytorch_accel_lite.schedulers.placeholders import Placeholder, replace_trainer_placeholder_values
from pytorch_accel_lite.schedulers.schedule_arguments import check_factory


def check_scheduler(trainer: TrainerLike, request: RunRequest, steps_itself: bool) -> None:
    """Check that the scheduler can be stepped as a run requests, and is given a metric if and only if it takes one.

    Args:
        steps_itself: whether the trainer's own method steps the scheduler
    """
    scheduler, interval, metric = trainer.scheduler, request.scheduler_interval, request.scheduler_metric
    # An overridden create_scheduler may also return no scheduler.
    is_overridden = "create_scheduler" in trainer.current_run.overridden
    create_scheduler_fn = None if is_overridden else trainer.create_scheduler_fn
    parts = schedulers_in(scheduler)
    if create_scheduler_fn is not None or (scheduler is not None and not steps_itself):
        for name, part in parts.items():
            if not hasattr(part, "step") or isinstance(part, type):
                source = "create_scheduler" if create_scheduler_fn is None else "create_scheduler_fn"
                source += f"[{name!r}]" if name else ""
                what = "a class" if isinstance(part, type) else "not a scheduler: it has no step()"
                hint = " Call this function, too." if callable(part) and not isinstance(part, type) else ""
                raise TypeError(
                    f"{source} returned {short_repr(part)}, which is {what}.{hint} Return a scheduler created from the "
                    "optimizer."
                )
    if scheduler is None:
        if (interval, metric) != ("update", None):
            name, value = ("scheduler_interval", interval) if metric is None else ("scheduler_metric", metric)
            raise ValueError(f"{name}={value!r} needs a scheduler. Pass create_scheduler_fn, or omit it.")
        return
    _refuse_placeholders(scheduler, parts)
    if request.saves_training_states:
        _check_has_state(parts)
    if steps_itself:
        return
    if metric is not None and not any(map(follows_metric, parts.values())):
        kinds = " and ".join(f"{type(part).__name__}.step" for part in parts.values())
        raise ValueError(f"scheduler_metric={metric!r}: {kinds} takes no metric, unlike ReduceLROnPlateau's. Omit it.")
    for part in parts.values():
        _check_stepped(part, request)


def _check_has_state(parts: Mapping[str, TrainerScheduler]) -> None:
    """Check that training states can keep a scheduler."""
    for part in parts.values():
        if not hasattr(part, "state_dict"):
            raise TypeError(
                f"{type(part).__name__}, the scheduler, has no state_dict(), so training states cannot keep it. Give "
                "it state_dict() and load_state_dict(state), or derive it from torch.optim.lr_scheduler.LRScheduler."
            )


def _refuse_placeholders(scheduler: TrainerScheduler, parts: Mapping[str, TrainerScheduler]) -> None:
    """Refuse placeholders that a scheduler has kept, or put into the optimizer."""
    groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", ())
    for held in [*groups, *(getattr(part, "__dict__", {}) for part in parts.values())]:
        for name, value in held.items():
            if isinstance(value, Placeholder):
                raise TypeError(
                    f"{type(scheduler).__name__} has {name}={value!r}, a placeholder that was not replaced. "
                    "Placeholders are replaced among the arguments of a functools.partial, not inside a function: pass "
                    "it as an argument, as in "
                    "lr_lambda=partial(my_rate, total=TrainerPlaceholderValues.MAX_NUM_TRAIN_STEPS)."
                )


def _check_stepped(scheduler: TrainerScheduler, request: RunRequest) -> None:
    """Check that a scheduler can be stepped in the way the run will step it."""
    metric = request.scheduler_metric
    kind = type(scheduler).__name__
    if metric is None and not _accepts(scheduler.step):
        raise TypeError(
            f"{kind}.step needs an argument. If it follows a metric, specify that, for example with "
            "scheduler_interval='epoch' and scheduler_metric='eval_loss_epoch'; for timm's schedulers, use "
            "TrainerWithTimmScheduler; for others, override scheduler_step."
        )
    better = request.metrics.directions.get(metric or "")
    if better is not None and getattr(scheduler, "mode", None) == ("min" if better else "max"):
        raise ValueError(
            f"scheduler_metric={metric!r}: {'greater' if better else 'smaller'} values of this metric are better, but "
            f"{kind} has mode={scheduler.mode!r}. Create it with mode={'max' if better else 'min'!r}."
        )


def _check_scheduled_optimizer(trainer: TrainerLike) -> None:
    """Check that the schedulers change the rates of the trainer's optimizers, not of other optimizers."""
    for name, scheduler in _schedulers_of_other_optimizers(trainer).items():
        function = f"create_scheduler_fn[{name!r}]" if name else "create_scheduler_fn"
        source = "create_scheduler" if "create_scheduler" in trainer.current_run.overridden else function
        raise ValueError(
            f"{source} returned a {type(scheduler).__name__} of another optimizer, so the learning rate of the "
            "trainer's would never change. Create it from the optimizer that the function is passed, which is "
            "trainer.optimizer."
        )


def warn_of_left_schedule(trainer: TrainerLike) -> None:
    """Warn of schedulers that still belong to an optimizer which a callback has replaced."""
    for scheduler in _schedulers_of_other_optimizers(trainer).values():
        warn_outside(
            f"trainer.optimizer was replaced within the run, but the {type(scheduler).__name__} still sets the rates "
            "of the one before. Assign trainer.scheduler = ..., too, with a scheduler of the new optimizer, or None."
        )


def _schedulers_of_other_optimizers(trainer: TrainerLike) -> dict[str, SchedulerLike]:
    """Return the schedulers, by optimizer name, whose parameter groups no optimizer of the trainer has."""
    optimizers = (trainer.optimizer, *other_optimizers(trainer).values())
    trained = {id(group) for optimizer in optimizers for group in getattr(optimizer, "param_groups", ())}
    others = {}
    for name, scheduler in schedulers_in(trainer.scheduler).items():
        groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", ())
        if groups and trained.isdisjoint(map(id, groups)):
            others[name] = scheduler
    return others


def check_schedule_length(trainer: TrainerLike, run: Run) -> None:
    """Check that a schedule that cannot be stepped beyond its end lasts for the whole run."""
    config = run.required_config
    requested = config.max_num_train_steps if run.request.scheduler_interval == "update" else config.num_epochs
    if "scheduler_step" in run.overridden or requested is None:
        return
    for scheduler in schedulers_in(trainer.scheduler).values():
        if isinstance(scheduler, OneCycleLR) and scheduler.total_steps < requested:
            if run.resumed is not None and not run.schedule.is_recreated:
                raise ValueError(
                    f"The state {str(run.resumed.directory)!r} has a OneCycleLR of {scheduler.total_steps} steps, "
                    f"which cannot be stepped beyond its end; the run now has {requested}. A resumed schedule stays as "
                    "long as it was. To train on with a schedule of its own, load the weights, "
                    "trainer.load_checkpoint(state, load_optimizer=False, load_scheduler=False), and call train() "
                    "without resume_from."
                )
            raise ValueError(
                f"OneCycleLR has total_steps={scheduler.total_steps}, but the run steps it {requested} times, and it "
                "cannot be stepped beyond its end. Pass total_steps=TrainerPlaceholderValues.MAX_NUM_TRAIN_STEPS "
                "(NUM_EPOCHS with scheduler_interval='epoch')."
            )


def warn_of_other_schedule(trainer: TrainerLike, state: TrainingState) -> None:
    """Warn if either the saved run or the resumed one has no schedule."""
    had, has = state.shared["scheduler"] is not None, trainer.scheduler is not None
    if had and not has:
        problem = "it holds a schedule, but create_scheduler_fn was not passed to train(), so rates stay as set"
    elif has and not had:
        problem = "it holds no schedule, so that of create_scheduler_fn starts from the beginning"
    else:
        return
    warn_outside(
        f"resume_from: the state {str(state.directory)!r} is of another run: {problem}. Pass the "
        "create_scheduler_fn of the run that saved it, unless you mean this."
    )


def _accepts(function: Callable[..., object], *arguments: object) -> bool:
    """Whether a function can be called with these positional arguments."""
    try:
        inspect.signature(function).bind(*arguments)
    except (TypeError, ValueError) as error:
        return isinstance(error, ValueError)  # the function is not written in Python
    return True


def begin_schedule(trainer: TrainerLike, run: Run) -> None:
    """Create the scheduler of a run, if it has one, starting from the optimizer's initial rates."""
    trainer.scheduler = None
    has_schedule = trainer.create_scheduler_fn is not None or "create_scheduler" in run.overridden
    initial = None
    if has_schedule or any("initial_lr" in group for group in trainer.optimizer.param_groups):
        initial = _begin_from_initial_rates(trainer, run, has_schedule)
    else:
        trainer._check_scheduler(run.request)
    if run.ranks.world_size > 1 and trainer.check_replicas:
        check_same_on_all_ranks(kinds_of_schedulers(trainer.scheduler), run.ranks)
    for check in RUN_CHECKS.of_schedule:
        check(trainer, run, initial if run.resumed is None else None)
    if trainer.scheduler is not None and run.resumed is None:
        check_schedule_length(trainer, run)


def _begin_from_initial_rates(trainer: TrainerLike, run: Run, has_schedule: bool) -> Options | None:
    """Create the scheduler; if it cannot be stepped, the optimizer keeps its rates.

    Returns:
        the options of the optimizer from before any schedule; ``None`` if the scheduler continues an earlier one
    """
    optimizer = trainer.optimizer
    now = scheduled_options(optimizer)
    initial = initial_options(optimizer, noted_options(optimizer))
    try:
        continues = has_schedule and _create_or_continue(trainer, initial, now)
        trainer._check_scheduler(run.request)
    except Exception:
        set_options(optimizer, now)
        raise
    if trainer.scheduler is None:
        set_options(optimizer, now)
        return initial
    _check_scheduled_optimizer(trainer)
    if not continues:
        run.schedule.initial_options = initial
    return None if continues else initial


def _create_or_continue(trainer: TrainerLike, initial: Options, now: Options) -> bool:
    """Create the scheduler; return whether it continues from the current rates, if it was created with last_epoch."""
    had_schedule = all("initial_lr" in group for group in trainer.optimizer.param_groups)
    try:
        trainer.scheduler = create_from_options(trainer, initial)
    except KeyError as error:
        if not (had_schedule and "initial_lr" in str(error)):
            raise
        set_options(trainer.optimizer, now)
        trainer.scheduler = trainer.create_scheduler()
        return True
    return False


def create_from_options(trainer: TrainerLike, options: Options) -> TrainerScheduler:
    """Create a scheduler for an optimizer with these options and no traces of an earlier schedule."""
    groups = trainer.optimizer.param_groups
    set_options(trainer.optimizer, options)
    had_initial = [names_of_initial(group) for group in groups]
    for group, names in zip(groups, had_initial, strict=True):
        for name in names:
            del group[f"initial_{name}"]
    scheduler = None
    try:
        scheduler = trainer.create_scheduler()
    finally:
        for group, values, names in zip(groups, options, had_initial, strict=True):
            for name in values.keys() & {*names, *(() if scheduler is None else ("lr",))}:
                group.setdefault(f"initial_{name}", values[name])
    return scheduler


def create_scheduler_from(trainer: TrainerLike, create: SchedulerFactory) -> TrainerScheduler:
    """Return the scheduler of a trainer's optimizer, or the schedulers of several, with placeholders replaced."""
    create = replace_trainer_placeholder_values(trainer, create)
    if not isinstance(create, Mapping):
        check_factory(create)
        return create(trainer.optimizer)
    optimizers = parts_of_optimizer(trainer.optimizer)
    for name in create.keys() - optimizers.keys():
        existing = ", ".join(map(repr, optimizers)) or "one without a name"
        raise ValueError(f"create_scheduler_fn[{name!r}]: no optimizer has that name, only {existing}.")
    for name, function in create.items():
        check_factory(function, f"create_scheduler_fn[{name!r}]")
    return create_schedulers(create, trainer.optimizer)
