"""Advancing a schedule that is created again to the completed fraction of the run."""

from __future__ import annotations

import math
import warnings
from itertools import pairwise

from pytorch_accel_lite.extending import Run, TrainerLike, TrainingState
from pytorch_accel_lite.extension_tools.optimizers_and_gradients import Rate, initial_options, learning_rates
from pytorch_accel_lite.extension_tools.runs_and_steps import create_from_options

_PLACEHOLDERS = "TrainerPlaceholderValues.NUM_UPDATE_STEPS_PER_EPOCH or MAX_NUM_TRAIN_STEPS"


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
        trainer.scheduler = create_from_options(trainer, initial)
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
        # Between two updates a schedule may change further than at them, as right before a warm restart.
        step = 0.0 if rate is None else max((abs(after - before) for before, after in pairwise(near)), default=0.0)
        if rate is not None and not 0.95 * (min(near) - step) <= rate <= 1.05 * (max(near) + step):
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
    remaining: int | None = run.data.required_train_loader.steps_left(progress.samples_in_epoch, progress.step)
    if remaining is None:
        nominal: int = progress.samples_in_epoch // run.required_config.train_total_batch_size
        return updates + min(nominal, per_epoch)
    return updates + max(0, per_epoch - math.ceil(remaining / run.window.steps))
