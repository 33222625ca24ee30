"""The learning rate schedule of a run, and the rates from which it starts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pytorch_accel_lite.base.inspection import is_overridden
from pytorch_accel_lite.base.placeholders import replace_trainer_placeholder_values
from pytorch_accel_lite.base.protocols import TrainerLike
from pytorch_accel_lite.engine.run import Run
from pytorch_accel_lite.engine.schedule_checks import check_scheduler_factory
from pytorch_accel_lite.optimizers.combined import create_schedulers
from pytorch_accel_lite.optimizers.operations import SchedulerFactory
from pytorch_accel_lite.optimizers.rates import Options, initial_options, scheduled_options, set_options

if TYPE_CHECKING:
    from pytorch_accel_lite.base.run_settings import RunRequest


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
