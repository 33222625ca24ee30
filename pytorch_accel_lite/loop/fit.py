"""The outline of ``train()``: how a run is set up, from its settings to its loop. The loop is in ``training.py``."""

from __future__ import annotations

import os
from contextlib import nullcontext

from pytorch_accel_lite.loop import custom_loops, lifecycle, scheduler_creation, training, training_setup
from pytorch_accel_lite.run.run import Run, TrainerLike
from pytorch_accel_lite.run.settings import LoaderArguments
from pytorch_accel_lite.run.signals import ending_at_signals, exit_after_signal


def fit(
    trainer: TrainerLike,
    run: Run,
    loader_arguments: LoaderArguments,
    resume_from: str | os.PathLike[str] | None,
    reset_run_history: bool,
) -> None:
    """Train in a run, from the beginning or from a state."""
    call = "train()" if resume_from is None else "train(resume_from=...)"
    with run.goodput.running(), lifecycle.entering(trainer, run, call):
        training_setup.configure(trainer, run)
        training_setup.find_state_to_resume(trainer, run, resume_from)
        training_setup.prepare_data(trainer, run, loader_arguments)
        training_setup.prepare_training(trainer, run, loader_arguments.batch_size)
        scheduler_creation.begin_schedule(trainer, run)
        training_setup.begin_or_resume(trainer, run, reset_run_history)
        with ending_at_signals(run.control.request) if run.request.ends_at_signals else nullcontext():
            training.begin_training(trainer, run)
            if "_run_training" in run.overridden:
                custom_loops.run_custom_loop(trainer, run)
            else:
                training.train(trainer, run)
    if run.end.pause is not None:
        exit_after_signal(run.end.pause)
