"""Creating the scheduler of a run, which starts from the initial rates of the optimizer."""

from __future__ import annotations

from collections.abc import Mapping

from pytorch_accel_lite.loop.guards.schedule_checks import check_schedule_length, check_scheduled_optimizer
from pytorch_accel_lite.optimizers.combined_optimizers import create_schedulers
from pytorch_accel_lite.optimizers.optimizer_parts import parts_of_optimizer
from pytorch_accel_lite.optimizers.optimizer_types import SchedulerFactory, TrainerScheduler
from pytorch_accel_lite.optimizers.scheduled_options import (
    Options,
    initial_options,
    names_of_initial,
    noted_options,
    scheduled_options,
    set_options,
)
from pytorch_accel_lite.run.run import Run, TrainerLike
from pytorch_accel_lite.run.run_checks_seam import RUN_CHECKS
from pytorch_accel_lite.schedulers.placeholders import replace_trainer_placeholder_values
from pytorch_accel_lite.schedulers.schedule_arguments import check_factory


def begin_schedule(trainer: TrainerLike, run: Run) -> None:
    """Create the scheduler of a run, if it has one, starting from the optimizer's initial rates."""
    trainer.scheduler = None
    has_schedule = trainer.create_scheduler_fn is not None or "create_scheduler" in run.overridden
    initial = None
    if has_schedule or any("initial_lr" in group for group in trainer.optimizer.param_groups):
        initial = _begin_from_initial_rates(trainer, run, has_schedule)
    else:
        trainer._check_scheduler(run.request)
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
    check_scheduled_optimizer(trainer)
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
