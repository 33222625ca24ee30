"""Resuming a run from a training state: its position, and that of its learning rate schedule."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

from pytorch_accel_lite.base.environment import warn_outside
from pytorch_accel_lite.base.inspection import is_overridden
from pytorch_accel_lite.base.protocols import TrainerLike
from pytorch_accel_lite.checkpoint.training_state import TrainingState
from pytorch_accel_lite.engine.run import Run
from pytorch_accel_lite.engine.scheduling import create_from
from pytorch_accel_lite.optimizers.rates import initial_options, learning_rates

_PLACEHOLDERS = "TrainerPlaceholderValues.NUM_UPDATE_STEPS_PER_EPOCH or MAX_NUM_TRAIN_STEPS"


def has_nothing_left(trainer: TrainerLike, run: Run, state: TrainingState) -> bool:
    """Whether a resumed run has nothing left to do; prints the reason."""
    saved = state.metadata
    if saved["stop_reason"] is not None and not saved["interrupted"] and not _is_trained_further(trainer, run, saved):
        run.end.reason, run.end.stopped_by = saved["stop_reason"], saved.get("stopped_by")
        return True
    ends_its_epoch = run.progress.is_mid_epoch and run.progress.update == run.request.max_num_train_steps
    if run.is_finished and not ends_its_epoch:
        trainer.print("Nothing left to do: the run had finished. Increase num_epochs to continue it.")
        return True
    return False


def _is_trained_further(trainer: TrainerLike, run: Run, saved: Mapping[str, Any]) -> bool:
    """Whether a run that was stopped is longer now, or without the callback that stopped it; prints how it could be."""
    length = "num_epochs" if run.request.max_num_train_steps is None else "max_num_train_steps"
    before, now = saved["run_config"].get(length), getattr(run.required_config, length)
    source = saved.get("stopped_by")
    if None not in (before, now) and now > before:
        trainer.print(f"The run was stopped, but is trained further: {length} was {before} and is {now} now.")
        return True
    callbacks = [callback._as_created() for callback in trainer.callback_handler]  # noqa: SLF001
    if source is not None and source not in callbacks:
        trainer.print(f"The run was stopped by {source}, but is trained further without it.")
        return True
    change = "" if source is None else f", or pass {source.partition('(')[0]} with other arguments or not at all"
    trainer.print(
        f"Nothing left to do: the run was stopped. {saved['stop_reason']} To train it further, increase {length}"
        f"{change}."
    )
    return False


def schedule_was_for_others(trainer: TrainerLike, run: Run, state: TrainingState) -> bool:
    """Whether a state's schedule counts updates while the number of updates per epoch has changed.

    A run that is limited by updates rather than epochs is still as long as it was.
    """
    before = state.metadata["run_config"].get("num_update_steps_per_epoch")
    now = run.required_config.num_update_steps_per_epoch
    counts_updates = run.request.scheduler_interval == "update" and not getattr(trainer.scheduler, "t_in_epochs", False)
    has_both = trainer.scheduler is not None and state.shared["scheduler"] is not None
    is_of_epochs = run.request.max_num_train_steps is None and None not in (before, now)
    return has_both and counts_updates and is_of_epochs and before != now


def warn_of_other_schedule(trainer: TrainerLike, state: TrainingState) -> None:
    """Warn if either the saved run or the resumed one has no schedule."""
    is_saved = state.shared["scheduler"] is not None
    if is_saved == (trainer.scheduler is not None):
        return
    difference = (
        "it holds a schedule, but train() was called without create_scheduler_fn, so learning rates stay as set"
        if is_saved
        else "it holds no schedule, so that of create_scheduler_fn starts from the beginning"
    )
    warn_outside(
        f"resume_from: the state {str(state.directory)!r} is of another run: {difference}. Pass the "
        "create_scheduler_fn of the run that saved it, unless you mean this."
    )


def align_windows(run: Run, state: TrainingState) -> None:
    """Resume at the start of an accumulation window, even if the length of windows has changed."""
    steps = run.window.steps
    if run.progress.is_mid_epoch and state.metadata["run_config"].get("gradient_accumulation_steps", steps) != steps:
        run.progress.step += -run.progress.step % steps


def resume_schedule(trainer: TrainerLike, run: Run, state: TrainingState) -> None:
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
        trainer.scheduler = create_from(trainer, initial)
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
                run.schedule.shift = update - run.progress.update
                trainer.scheduler_step()
                around.append(learning_rates(trainer.optimizer))
            _check_continuity(trainer, had, list(zip(*around, strict=True)), about)
        run.schedule.shift = position - run.progress.update
        create_at(position)
    trainer.print(f"{about}.")


def _check_continuity(trainer: TrainerLike, had: list[Any], around: list[tuple[Any, ...]], about: str) -> None:
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
    left: int | None = run.data.train_loader.steps_left(progress.samples_in_epoch)
    if left is None:
        nominal: int = progress.samples_in_epoch // run.required_config.train_total_batch_size
        return made + min(nominal, per_epoch)
    return made + max(0, per_epoch - math.ceil(left / run.window.steps))


def _advance(trainer: TrainerLike, update: int, about: str) -> None:
    try:
        trainer.advance_scheduler(update)
    except Exception as error:
        raise ValueError(
            f"{about}, which failed: {error} Specify its lengths with {_PLACEHOLDERS}, or override "
            "Trainer.advance_scheduler."
        ) from error


def advance_scheduler(self: TrainerLike, num_updates: int) -> None:
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
