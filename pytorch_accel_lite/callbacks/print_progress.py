"""Printing a line when runs and epochs start and end; the table and "Trained 3 epochs" are ``progress_table``'s."""

from __future__ import annotations

from pytorch_accel_lite.run.events import TrainerCallback
from pytorch_accel_lite.run.run import TrainerLike


class PrintProgressCallback(TrainerCallback):
    """Print a message when a run and each epoch start, and when the run ends, unless it failed or was paused."""

    affects_training = False
    arguments_may_differ = True

    def on_training_run_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        trainer.print("Starting training run")

    def on_train_epoch_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        trainer.print(f"Starting epoch {epoch_of(trainer)}")

    def on_training_run_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        if trainer.run.end.is_regular:
            trainer.print("Finishing training run")

    def on_evaluation_run_start(self, trainer: TrainerLike, **kwargs: object) -> None:
        trainer.print("Starting evaluation run")

    def on_evaluation_run_end(self, trainer: TrainerLike, **kwargs: object) -> None:
        trainer.print("Finishing evaluation run")


def epoch_of(trainer: TrainerLike) -> str:
    """Return the number of the current epoch and, if known, the number of epochs, such as ``3/10``."""
    config = trainer.run_config
    epoch = trainer.progress.epoch
    planned = None if config is None else config.num_epochs
    return f"{epoch}" if planned is None or epoch > planned else f"{epoch}/{planned}"
