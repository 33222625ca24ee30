"""The learning rate schedule of a run: where it starts, and where it continues when a run is resumed."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pytorch_accel_lite.rates import Options, initial_options, learning_rates, scheduled_options, set_options
from pytorch_accel_lite.run import Run
from pytorch_accel_lite.utils import is_overridden

if TYPE_CHECKING:
    from pytorch_accel_lite.checkpoint.training_state import TrainingState
    from pytorch_accel_lite.run_config import RunRequest
    from pytorch_accel_lite.trainer import Trainer

_PLACEHOLDERS = "TrainerPlaceholderValues.NUM_UPDATE_STEPS_PER_EPOCH or MAX_NUM_TRAIN_STEPS"


def begin_schedule(trainer: Trainer, run: Run, check: Callable[[RunRequest], None]) -> None:
    """Create the scheduler of a run, if it has one, starting from the optimizer's initial rates.

    :param check: validates the run; if it raises an error, the optimizer keeps its rates
    """
    optimizer = trainer.optimizer
    run.rates_left = [] if run.before is None else run.before.rates_left
    now = scheduled_options(optimizer)
    initial = initial_options(optimizer, run.rates_left)
    trainer.scheduler = None
    try:
        begins = _create(trainer, now, initial)
        check(run.request)
    except Exception:
        set_options(optimizer, now)
        raise
    if begins and trainer.scheduler is not None:
        run.initial_options = initial
    if begins and run.resumed is None:
        _say_where_it_begins(trainer, *([values.get("lr") for values in options] for options in (now, initial)))


def _create(trainer: Trainer, now: Options, initial: Options) -> bool:
    """Create the scheduler, and return whether it starts afresh rather than continuing an earlier one."""
    optimizer = trainer.optimizer
    if trainer.create_scheduler_fn is not None or is_overridden(trainer, "create_scheduler"):
        had_schedule = all("initial_lr" in group for group in optimizer.param_groups)
        try:
            trainer.scheduler = _create_from(trainer, initial)
        except KeyError as error:  # with last_epoch, the schedule continues from the current rates
            if not had_schedule or "initial_lr" not in str(error):
                raise
            set_options(optimizer, now)
            trainer.scheduler = trainer.create_scheduler()
            return False
    if trainer.scheduler is None:
        set_options(optimizer, now)
    return True


def _create_from(trainer: Trainer, options: Options) -> Any:
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


def _say_where_it_begins(trainer: Trainer, now: list[Any], initial: list[Any]) -> None:
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


def schedule_was_for_others(trainer: Trainer, run: Run, state: TrainingState) -> bool:
    """Whether a state's schedule counts updates while the number of updates per epoch has changed.

    A run that is limited by updates rather than epochs is still as long as it was.
    """
    before = state.metadata["run_config"].get("num_update_steps_per_epoch")
    now = run.required_config.num_update_steps_per_epoch
    counts_updates = run.request.scheduler_interval == "update" and not getattr(trainer.scheduler, "t_in_epochs", False)
    has_both = trainer.scheduler is not None and state.shared["scheduler"] is not None
    is_of_epochs = run.request.max_num_train_steps is None and None not in (before, now)
    return has_both and counts_updates and is_of_epochs and before != now


def align_windows(run: Run, state: TrainingState) -> None:
    """Resume at the start of an accumulation window, even if the length of windows has changed."""
    steps = run.window.steps
    if run.progress.is_mid_epoch and state.metadata["run_config"].get("gradient_accumulation_steps", steps) != steps:
        run.progress.step += -run.progress.step % steps


def resume_schedule(trainer: Trainer, run: Run, state: TrainingState) -> None:
    """Recreate the schedule of a resumed run with its new lengths, and advance it to the fraction of the run completed.

    :raises ValueError: if it cannot be advanced, or its learning rate there differs from that of the run
    """
    config = run.required_config
    per_epoch = int(config.num_update_steps_per_epoch or 0)
    before = int(state.metadata["run_config"]["num_update_steps_per_epoch"])
    total = int(config.max_num_train_steps or 0)
    position = _updates_made(run, per_epoch)
    had = learning_rates(trainer.optimizer)
    initial = initial_options(trainer.optimizer)
    about = (
        f"The run is resumed with {per_epoch} updates in an epoch instead of {before}, so its schedule is created "
        f"again and advanced to update {position} of {total}"
    )

    def create_at(update: int) -> list[Any]:
        trainer.scheduler = _create_from(trainer, initial)
        _advance(trainer, update, about)
        return learning_rates(trainer.optimizer)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of .lr_scheduler.step")
        if not is_overridden(trainer, "advance_scheduler"):
            # Rounding between the two lengths of epochs may shift the position by this many updates.
            reach = 2 + 2 * math.ceil(per_epoch / before)
            first = max(0, position - reach)
            around = [create_at(first)]
            for update in range(first + 1, min(position + reach, total) + 1):
                run.schedule_shift = update - run.progress.update
                trainer.scheduler_step()
                around.append(learning_rates(trainer.optimizer))
            _check_continuity(trainer, had, list(zip(*around, strict=True)), about)
        run.schedule_shift = position - run.progress.update
        create_at(position)
    trainer.print(f"{about}.")


def _check_continuity(trainer: Trainer, had: list[Any], around: list[tuple[Any, ...]], about: str) -> None:
    for rate, near in zip(had, around, strict=True):
        if rate is not None and not 0.95 * min(near) <= rate <= 1.05 * max(near):
            raise ValueError(
                f"{about}. But {type(trainer.scheduler).__name__} has learning rates from {min(near):.3g} to "
                f"{max(near):.3g} near there, and the run had {rate:.3g}. Its lengths must follow those of the run: "
                f"specify them with {_PLACEHOLDERS}, or override Trainer.advance_scheduler."
            )


def _updates_made(run: Run, per_epoch: int) -> int:
    """Return the number of updates that a run with these settings would have made for the samples seen so far."""
    progress = run.progress
    made: int = progress.epochs_completed * per_epoch
    if not progress.is_mid_epoch:
        return made
    left: int | None = run.train_loader.steps_left(progress.samples_in_epoch)
    if left is None:
        nominal: int = progress.samples_in_epoch // run.required_config.train_total_batch_size
        return made + min(nominal, per_epoch)
    return made + max(0, per_epoch - math.ceil(left / run.window.steps))


def _advance(trainer: Trainer, update: int, about: str) -> None:
    try:
        trainer.advance_scheduler(update)
    except Exception as error:
        raise ValueError(
            f"{about}, which failed: {error} Specify its lengths with {_PLACEHOLDERS}, or override "
            "Trainer.advance_scheduler."
        ) from error


def advance_scheduler(self: Trainer, num_updates: int) -> None:
    """Advance a newly created scheduler to its position after a number of updates.

    Called instead of restoring the scheduler's state when a run is resumed with a different number of updates per
    epoch. Steps the scheduler ``num_updates`` times by default. Override it if the scheduler is stepped differently.

    :param num_updates: number of updates that a run with the new settings would have made for the samples seen so far
    :raises TypeError: if ``scheduler_step`` is overridden and this method is not
    """
    if is_overridden(self, "scheduler_step"):
        raise TypeError(f"{type(self).__name__}.scheduler_step is overridden, so how to advance is unknown.")
    for _ in range(num_updates):
        self.scheduler.step()
