"""Checks at the ends of an epoch and of a run: of the number of steps, and of the weights."""

from __future__ import annotations

from torch.utils.data import IterableDataset

from pytorch_accel_lite.base.warnings_and_errors import warn_outside
from pytorch_accel_lite.data.sources import Source, find_length
from pytorch_accel_lite.run.run import Run, TrainerLike
from pytorch_accel_lite.run.trained_objects import weights_are_finite


def steps_of_stream(run: Run, loader: Source) -> int | None:
    """Return the length of a stream in steps, if it has one and the epoch begins with it."""
    # A stream that divides itself among the processes may have the length of all data.
    is_stream = run.data.ranks.world_size == 1 and isinstance(getattr(loader.source, "dataset", None), IterableDataset)
    return find_length(loader) if is_stream and not run.progress.step else None


def check_num_steps(run: Run, loader: Source, length: int | None) -> None:
    """Check that an epoch had batches. Warn if a stream ended before its length, on which schedules rely."""
    steps = run.progress.step
    if not steps:
        raise ValueError("train_dataset gave no batch in this epoch: is it empty or exhausted?")
    workers = getattr(loader.source, "num_workers", 0)  # each may drop a batch
    if length is not None and steps + workers < length:
        warn_outside(
            f"The training data ended after {steps} steps of this epoch, but their length is {length} steps, by which "
            "schedules and the remaining time are computed. Return the true length in __len__ of the dataset, or "
            "define none, and pass max_num_train_steps."
        )


def warn_of_nonfinite_weights(trainer: TrainerLike, run: Run) -> None:
    """Warn of weights that are not finite at the end of a run."""
    if run.progress.update and not weights_are_finite(trainer) and run.ranks.rank == 0:
        warn_outside(
            f"The run has ended, after update {run.progress.update}, with weights that are infinite or NaN. Lower the "
            "learning rate, clip the gradients (gradient_clip_norm=1.0), or skip such updates (GradientSpikeCallback), "
            "and train again, or resume from an earlier state."
        )
