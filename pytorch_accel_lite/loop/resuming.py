"""Resuming a run from a state that it has read: what is restored before and after its starting events, and its end.

``begin_resuming`` restores a state before the starting events of the run, and ``end_resuming`` the rest after the last
of them: those of the epoch if the run resumes within the steps of an epoch, otherwise those of the run. In between,
``run.resumed`` is the state. Afterwards it is ``None``, as in a run that is not resumed, where the functions here that
the loop calls do nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeAlias

from pytorch_accel_lite.base.slots import Slot
from pytorch_accel_lite.base.types import JsonObject
from pytorch_accel_lite.checkpoint.models.states_of_trained_objects import describe_attributes
from pytorch_accel_lite.checkpoint.models.trainability import (
    note_left_trainability,
    note_trainability,
    undo_trainability,
)
from pytorch_accel_lite.checkpoint.states.capture_and_restore import (
    restore_after_start,
    restore_again,
    restore_before_start,
)
from pytorch_accel_lite.checkpoint.states.settings_in_states_seam import settings_recorder
from pytorch_accel_lite.loop.guards.modes import has_starting_code
from pytorch_accel_lite.loop.scheduling import check_schedule_length, warn_of_other_schedule
from pytorch_accel_lite.optimizers.optimizer_parts import parts_of_optimizer
from pytorch_accel_lite.optimizers.scheduled_options import Options, all_options
from pytorch_accel_lite.run.ending import StopTrainingError
from pytorch_accel_lite.run.run import Run, TrainerLike
from pytorch_accel_lite.run.training_state import TrainingState

Recreate: TypeAlias = Callable[[TrainerLike, Run, TrainingState], None]
#: Creates the schedule of a resumed run again, with its new length, and advances it to the completed fraction.
SCHEDULE_RECREATION: Slot[Recreate] = Slot("elastic_schedules")


def note_changes(trainer: TrainerLike, run: Run) -> None:
    """Note at the end of a run what it leaves, for ``undo_changes()``.

    Attributes may be sharded, so that a process that has failed alone cannot read them. Nothing here, such as a device
    that has failed, may hide the error that ends the run.
    """
    if run.ranks.world_size == 1 or not run.end.has_failed:
        with suppress(Exception):
            run.user_attributes.note_left(trainer)
            note_left_trainability(trainer, run)


def undo_changes(trainer: TrainerLike, before: Run) -> None:
    """Undo what a run of this trainer has changed, before another one resumes, perhaps from an earlier state.

    A state holds what its run had changed by then. All else is as the program has created it, which a trainer is no
    longer that has trained, in a notebook or in a loop that tries again. What has been set since then stays.
    """
    before.user_attributes.undo(trainer)
    undo_trainability(trainer, before)


def begin_resuming(trainer: TrainerLike, run: Run) -> None:
    """Restore a state before the starting events, and recreate its schedule if epochs have another number of updates.

    Whether that is so must be known before the state is loaded, and the length of a schedule is checked afterwards.
    """
    state = run.resumed
    if state is None:
        return
    warn_of_other_schedule(trainer, state)
    recreate_schedule = _find_schedule_recreation(trainer, run, state)
    run.schedule.is_recreated = recreate_schedule is not None
    if "load_training_state" in run.overridden:
        trainer.load_training_state(state.directory)  # the method of Trainer, if it calls that, takes run.resumed
    else:
        restore_before_start(trainer, state, not run.schedule.is_recreated, has_starting_code(trainer, run))
    run.training_step.set_accumulation(trainer, run, run.accumulation.window_size_after(run.progress.update))
    for optimizer in (trainer.optimizer, *parts_of_optimizer(trainer.optimizer).values()):
        vars(optimizer)["_opt_called"] = True  # else torch warns if the schedule's first step ends a resumed epoch
    run.goodput.resume(state.metadata.get("goodput", {}), state.metadata["saved_at"])
    check_schedule_length(trainer, run)
    if recreate_schedule is not None:
        recreate_schedule(trainer, run, state)
    if run.recorded_settings is not None:
        changes = settings_recorder().compare(trainer, state, run.recorded_settings, run.user_attributes)
        if changes:
            trainer.print(changes)


def _find_schedule_recreation(trainer: TrainerLike, run: Run, state: TrainingState) -> Recreate | None:
    """Return what recreates the schedule, if it counts updates while the number of updates per epoch has changed.

    A run that is limited by updates keeps its schedule, because its length is unchanged.
    """
    before = state.metadata["run_config"].get("num_update_steps_per_epoch")
    now = run.required_config.num_update_steps_per_epoch
    counts_updates = run.request.scheduler_interval == "update" and not getattr(trainer.scheduler, "t_in_epochs", False)
    has_both = trainer.scheduler is not None and state.shared["scheduler"] is not None
    is_of_epochs = run.request.max_num_train_steps is None and None not in (before, now)
    if not (has_both and counts_updates and is_of_epochs and before != now):
        return None
    if run.accumulation.changes:
        raise ValueError(
            f"gradient_accumulation_steps={run.request.gradient_accumulation_steps!r} changes during the run, which is "
            f"resumed with {now} updates in the first epoch instead of {before}, so where its schedule is to continue "
            "is ambiguous. Resume it with the number of processes and the batch size that it had."
        )
    return SCHEDULE_RECREATION.get(f"Resuming a schedule with {now} updates in an epoch instead of {before}")


@contextmanager
def ending_resumption_at_latest(trainer: TrainerLike, run: Run) -> Iterator[None]:
    """End the resumption after the loop of a run, if no epoch has: nothing was left to do, or an event stopped it.

    If the run was stopped within an epoch, the losses of this epoch are recorded as they were then.
    """
    stopped: StopTrainingError | None = None
    try:
        yield
    except StopTrainingError as stop:
        stopped = stop
    if run.resumed is not None and run.end.reason is not None and not run.epoch_is_trained:
        run.loss_trackers = run.unrecorded_losses = trainer.division.create_trackers()
        end_resuming(trainer, run)
        run.record_interrupted_epoch(trainer.run_history)
    end_resuming(trainer, run)
    if stopped is not None:
        raise stopped


def resumed_run_is_over(trainer: TrainerLike, run: Run) -> bool:
    """Return whether a resumed run has nothing left to do, and print why; note the reason if it was stopped before."""
    if run.resumed is None:
        return False
    about, progress, limit = run.resumed.metadata, run.progress, run.request.max_num_train_steps
    was_stopped = about["stop_reason"] is not None and not about["interrupted"]
    is_over = was_stopped and not _continues_after_stop(trainer, run, about)
    if is_over:
        run.end.reason, run.end.stopped_by = about["stop_reason"], about.get("stopped_by")
    elif run.is_finished and not (progress.is_mid_epoch and progress.update == limit):  # it may still evaluate
        is_over = True
        length = "num_epochs" if limit is None or progress.update < limit else "max_num_train_steps"
        trainer.print(f"Nothing left to do: the run had finished. Increase {length} to continue it.")
    trainer.run_history.set_between_epochs(is_over and not progress.is_mid_epoch)
    return is_over


def options_before_epoch(trainer: TrainerLike, run: Run) -> Options | None:
    """Return the options for ``end_resuming()``, if the starting events of a resumed epoch may change them."""
    may_change = run.resumed is not None and has_starting_code(trainer, run)
    return all_options(trainer.optimizer) if may_change else None


def end_resuming(trainer: TrainerLike, run: Run, options: Options | None = None) -> None:
    """Restore what the starting events may have reset, and then the random generators.

    Args:
        options: the options of the optimizer before the starting events of the epoch, which the saved run had before
            it trained; by default, those of now
    """
    state = run.resumed
    if state is None:
        return
    # What an overridden method has loaded is not known.
    if has_starting_code(trainer, run) and "load_training_state" not in run.overridden:
        restore_again(trainer, state, all_options(trainer.optimizer) if options is None else options)
    restore_after_start(trainer, state)
    run.resumed = None


def print_state_contents(trainer: TrainerLike, run: Run) -> None:
    """Print which attributes training states include, once starting events may have added some.

    Also prints a message if it is known that a resumed run cannot read the same data. Does nothing in a run that
    neither saves states nor resumes from one.
    """
    if not run.request.saves_training_states and run.resumed is None:
        return
    note_trainability(trainer)
    for described in (describe_attributes(trainer), run.user_attributes.describe_unsaved(trainer)):
        if described:
            trainer.print(described)
    if note := getattr(run.data.train_loader, "resuming_note", ""):
        trainer.print(note)


def _continues_after_stop(trainer: TrainerLike, run: Run, about: JsonObject) -> bool:
    """Return whether a stopped run continues, because it is longer or lacks the callback that stopped it; print why."""
    length = "num_epochs" if run.request.max_num_train_steps is None else "max_num_train_steps"
    before, now = about["run_config"].get(length), getattr(run.required_config, length)
    source = about.get("stopped_by")
    if isinstance(before, int) and now is not None and now > before:
        trainer.print(f"The run was stopped, but is trained further: {length} was {before} and is {now} now.")
        return True
    callbacks = [callback._as_created() for callback in trainer.callback_handler]  # noqa: SLF001
    if source is not None and source not in callbacks:
        trainer.print(f"The run was stopped by {source}, but is trained further without it.")
        return True
    change = "" if source is None else f", or pass {source.partition('(')[0]} with other arguments or not at all"
    trainer.print(
        f"Nothing left to do: the run was stopped: {about['stop_reason'].rstrip('.')}. To train it further, increase "
        f"{length}{change}."
    )
    return False
