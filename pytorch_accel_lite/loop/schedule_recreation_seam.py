"""Whether a resumed run needs a schedule of another length, and the seam for creating it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from pytorch_accel_lite.base.slots import Slot
from pytorch_accel_lite.run.run import Run, TrainerLike
from pytorch_accel_lite.run.training_state import TrainingState

Recreate: TypeAlias = Callable[[TrainerLike, Run, TrainingState], None]
#: Creates the schedule of a resumed run again, with its new length, and advances it to the completed fraction.
SCHEDULE_RECREATION: Slot[Recreate] = Slot("elastic_schedules")


def find_schedule_recreation(trainer: TrainerLike, run: Run, state: TrainingState) -> Recreate | None:
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
