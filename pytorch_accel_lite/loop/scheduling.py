"""The learning rate schedule of a run: where it starts, and where it resumes."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Mapping, Sequence

import torch
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR

from pytorch_accel_lite.base.inspection import accepts
from pytorch_accel_lite.base.reprs import short_repr
from pytorch_accel_lite.base.text import wrapped
from pytorch_accel_lite.base.user_warnings import warn_outside
from pytorch_accel_lite.optimizers.combined import create_schedulers
from pytorch_accel_lite.optimizers.operations import (
    SchedulerFactory,
    TrainerScheduler,
    follows_metric,
    parts_of_optimizer,
    schedulers_in,
)
from pytorch_accel_lite.optimizers.rates import (
    Options,
    Rate,
    has_unused_scales,
    initial_options,
    learning_rates,
    scheduled_options,
    set_options,
)
from pytorch_accel_lite.run.modules_and_optimizers import other_optimizers
from pytorch_accel_lite.run.run import Run, TrainerLike
from pytorch_accel_lite.run.settings import RunRequest
from pytorch_accel_lite.run.training_state import TrainingState
from pytorch_accel_lite.schedulers.named_schedules import check_factory
from pytorch_accel_lite.schedulers.placeholders import Placeholder, replace_trainer_placeholder_values
from pytorch_accel_lite.schedulers.scheduler_base import PlannedLrScheduler

_PLACEHOLDERS = "TrainerPlaceholderValues.NUM_UPDATE_STEPS_PER_EPOCH or MAX_NUM_TRAIN_STEPS"


def begin_schedule(trainer: TrainerLike, run: Run) -> None:
    """Create the scheduler of a run, if it has one, starting from the optimizer's initial rates."""
    trainer.scheduler = None
    run.schedule.final_rates = [] if run.previous is None else run.previous.schedule.final_rates
    has_schedule = trainer.create_scheduler_fn is not None or "create_scheduler" in run.overridden
    if has_schedule or any("initial_lr" in group for group in trainer.optimizer.param_groups):
        _begin_from_initial_rates(trainer, run, has_schedule)
    else:
        trainer._check_scheduler(run.request)
    if run.ranks.rank == 0:
        _warn_of_unused_scales(trainer)


def _warn_of_unused_scales(trainer: TrainerLike) -> None:
    """Warn if nothing applies the ``lr_scale`` that timm's layer decay has put into the parameter groups."""
    if not any("lr_scale" in group for group in trainer.optimizer.param_groups):
        return
    schedulers = schedulers_in(trainer.scheduler).values()
    applies = any(isinstance(part, PlannedLrScheduler) or hasattr(part, "update_groups") for part in schedulers)
    if applies or not has_unused_scales(trainer.optimizer):
        return
    kind = "no scheduler" if trainer.scheduler is None else f"{type(trainer.scheduler).__name__}, which is not known to"
    warn_outside(
        "The optimizer's parameter groups have different lr_scale, as timm's layer decay sets them, but the same "
        f"learning rate: only some schedulers apply it, and the run has {kind}. Pass a schedule by name, such as "
        "create_scheduler_fn='constant', or use TrainerWithTimmScheduler; or multiply the rates before training: for "
        "group in optimizer.param_groups: group['lr'] *= group['lr_scale']"
    )


def _begin_from_initial_rates(trainer: TrainerLike, run: Run, has_schedule: bool) -> None:
    """Create the scheduler; if it cannot be stepped, the optimizer keeps its rates."""
    optimizer = trainer.optimizer
    now = scheduled_options(optimizer)
    initial = initial_options(optimizer, run.schedule.final_rates)
    had_schedule = all("initial_lr" in group for group in optimizer.param_groups)
    continues = False
    try:
        if has_schedule:
            try:
                trainer.scheduler = _create_from_options(trainer, initial)
            except KeyError as error:  # a scheduler created with last_epoch continues from the current rates
                continues = had_schedule and "initial_lr" in str(error)
                if not continues:
                    raise
                set_options(optimizer, now)
                trainer.scheduler = trainer.create_scheduler()
        trainer._check_scheduler(run.request)
    except Exception:
        set_options(optimizer, now)
        raise
    if trainer.scheduler is None:
        set_options(optimizer, now)
        if now != initial and run.resumed is None:
            current, first = ([values.get("lr") for values in options] for options in (now, initial))
            trainer.print(
                f"This run has no scheduler and trains at the learning rate {_format_rates(current)}, left over from "
                f"an earlier schedule; the optimizer started at {_format_rates(first)}. To return to that: for group "
                "in trainer.optimizer.param_groups: group['lr'] = group['initial_lr']"
            )
        return
    _check_scheduled_optimizer(trainer)
    if not continues:
        run.schedule.initial_options = initial
        if run.resumed is None:
            _print_unused_rates(trainer, initial)


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
        as_shown = {
            _format_rates([rate]) for rate in used if isinstance(rate, (int, float, torch.Tensor))
        }  # rates in tensors are rounded
        unused = [rate for group in groups if _format_rates([rate := rates.get(id(group))]) not in {"none", *as_shown}]
        if unused:
            message = (
                f"The optimizer's learning rate {_format_rates(unused)} has no effect: {type(scheduler).__name__} sets "
                f"rates of its own, up to max_lr={_format_rates(highest)}. Pass the rate that you want as max_lr, and "
                "leave out lr."
            )
            trainer.print(wrapped(message))


def _create_from_options(trainer: TrainerLike, options: Options) -> TrainerScheduler:
    """Create a scheduler for an optimizer with these options and no traces of an earlier schedule."""
    groups = trainer.optimizer.param_groups
    set_options(trainer.optimizer, options)
    traces = [group.pop("initial_lr", None) for group in groups]
    scheduler = None
    try:
        scheduler = trainer.create_scheduler()
    finally:
        for group, values, trace in zip(groups, options, traces, strict=True):
            if "lr" in values and (scheduler is not None or trace is not None):
                group.setdefault("initial_lr", values["lr"])
    return scheduler


def _format_rates(rates: Sequence[Rate | torch.Tensor]) -> str:
    return ", ".join(dict.fromkeys("none" if rate is None else f"{rate:.3g}" for rate in rates))


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


def step_after_update(trainer: TrainerLike, run: Run) -> None:
    """Step a per-update scheduler, unless the update was skipped, by ``skip_update()`` or by the gradient scaler."""
    if run.request.scheduler_interval == "update" and not trainer.update_was_skipped:
        trainer.scheduler_step()


def step_after_epoch(trainer: TrainerLike) -> None:
    """Step a per-epoch scheduler. A scheduler that follows a metric is stepped only after an evaluation."""
    run = trainer.current_run
    request = run.request
    each_epoch = trainer.scheduler is not None and request.scheduler_interval == "epoch"
    has_metric = request.scheduler_metric is None or run.evaluation_is_due or not run.data.all_eval_loaders
    if each_epoch and has_metric:
        trainer.scheduler_step()


def _check_scheduled_optimizer(trainer: TrainerLike) -> None:
    """Check that the schedulers change the rates of the trainer's optimizers, not of other optimizers."""
    optimizers = (trainer.optimizer, *other_optimizers(trainer).values())
    trained = {id(group) for optimizer in optimizers for group in getattr(optimizer, "param_groups", ())}
    for name, scheduler in schedulers_in(trainer.scheduler).items():
        groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", ())
        if groups and trained.isdisjoint(map(id, groups)):
            function = f"create_scheduler_fn[{name!r}]" if name else "create_scheduler_fn"
            source = "create_scheduler" if "create_scheduler" in trainer.current_run.overridden else function
            raise ValueError(
                f"{source} returned a {type(scheduler).__name__} of another optimizer, so the learning rate of the "
                "trainer's would never change. Create it from the optimizer that the function is passed, which is "
                "trainer.optimizer."
            )


def check_scheduler(
    scheduler: TrainerScheduler, request: RunRequest, create_scheduler_fn: SchedulerFactory | None, steps_itself: bool
) -> None:
    """Check that a scheduler can be stepped, and is given a metric if and only if it takes one.

    Args:
        create_scheduler_fn: the function that created the scheduler; ``None`` if an overridden ``create_scheduler``
            created it, which may also return no scheduler
        steps_itself: whether an overridden method steps the scheduler
    """
    interval, metric = request.scheduler_interval, request.scheduler_metric
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
    if steps_itself:
        return
    if metric is not None and not any(map(follows_metric, parts.values())):
        kinds = " and ".join(f"{type(part).__name__}.step" for part in parts.values())
        raise ValueError(f"scheduler_metric={metric!r}: {kinds} takes no metric, unlike ReduceLROnPlateau's. Omit it.")
    for part in parts.values():
        _check_stepped(part, request)


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
    if metric is None and not accepts(scheduler.step):
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


def must_recreate_schedule(trainer: TrainerLike, run: Run, state: TrainingState) -> bool:
    """Whether a state's schedule counts updates while the number of updates per epoch has changed.

    A run that is limited by updates keeps its schedule, because its length is unchanged.
    """
    before = state.metadata["run_config"].get("num_update_steps_per_epoch")
    now = run.required_config.num_update_steps_per_epoch
    counts_updates = run.request.scheduler_interval == "update" and not getattr(trainer.scheduler, "t_in_epochs", False)
    has_both = trainer.scheduler is not None and state.shared["scheduler"] is not None
    is_of_epochs = run.request.max_num_train_steps is None and None not in (before, now)
    recreates = has_both and counts_updates and is_of_epochs and before != now
    if recreates and run.accumulation.changes:
        raise ValueError(
            f"gradient_accumulation_steps={run.request.gradient_accumulation_steps!r} changes during the run, which is "
            f"resumed with {now} updates in the first epoch instead of {before}, so where its schedule is to continue "
            "is ambiguous. Resume it with the number of processes and the batch size that it had."
        )
    return recreates


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


def resume_schedule(trainer: TrainerLike, run: Run, state: TrainingState) -> None:
    """Recreate the schedule of a resumed run with new lengths, and advance it to the completed fraction of the run.

    Raises:
        ValueError: if the schedule cannot be advanced, or its learning rate at that point differs from the saved run's
    """
    config = run.required_config
    per_epoch = int(config.num_update_steps_per_epoch or 0)
    before = int(state.metadata["run_config"]["num_update_steps_per_epoch"])
    total = int(config.max_num_train_steps or 0)
    position = _equivalent_updates(run, per_epoch)
    had = learning_rates(trainer.optimizer)
    initial = initial_options(trainer.optimizer)
    about = (
        f"The run is resumed with {per_epoch} updates in an epoch instead of {before}, so its schedule is created "
        f"again and advanced to update {position} of {total}"
    )

    def rates_at(update: int) -> list[Rate]:
        trainer.scheduler = _create_from_options(trainer, initial)
        try:
            trainer.advance_scheduler(update)
        except Exception as error:
            raise ValueError(
                f"{about}, which failed: {error} Specify its lengths with {_PLACEHOLDERS}, or override "
                "Trainer.advance_scheduler."
            ) from error
        return learning_rates(trainer.optimizer)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of .lr_scheduler.step")
        if "advance_scheduler" not in run.overridden:
            # Rounding between the two lengths of epochs may shift the position by this many updates.
            reach = 2 + 2 * math.ceil(per_epoch / before)
            first = max(0, position - reach)
            around = [rates_at(first)]
            for update in range(first + 1, min(position + reach, total) + 1):
                run.schedule.shift = update - run.progress.update
                trainer.scheduler_step()
                around.append(learning_rates(trainer.optimizer))
            _check_continuity(trainer, had, list(zip(*around, strict=True)), about)
        run.schedule.shift = position - run.progress.update
        rates_at(position)
    trainer.print(f"{about}.")


def _check_continuity(trainer: TrainerLike, had: list[Rate], around: list[tuple[float, ...]], about: str) -> None:
    for rate, near in zip(had, around, strict=True):
        if rate is not None and not 0.95 * min(near) <= rate <= 1.05 * max(near):
            raise ValueError(
                f"{about}. But {type(trainer.scheduler).__name__} has learning rates from {min(near):.3g} to "
                f"{max(near):.3g} near there, and the run had {rate:.3g}. Its lengths must follow those of the run: "
                f"specify them with {_PLACEHOLDERS}, or override Trainer.advance_scheduler."
            )


def _equivalent_updates(run: Run, per_epoch: int) -> int:
    """Return the number of updates that a run with these settings would have made for the samples seen so far."""
    progress = run.progress
    updates: int = progress.epochs_completed * per_epoch
    if not progress.is_mid_epoch:
        return updates
    remaining: int | None = run.data.required_train_loader.steps_left(progress.samples_in_epoch)
    if remaining is None:
        nominal: int = progress.samples_in_epoch // run.required_config.train_total_batch_size
        return updates + min(nominal, per_epoch)
    return updates + max(0, per_epoch - math.ceil(remaining / run.window.steps))
