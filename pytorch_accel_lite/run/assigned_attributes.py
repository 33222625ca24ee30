"""Attributes of a trainer that a program may assign, although they belong to the current run."""

from __future__ import annotations

from typing import Literal

from pytorch_accel_lite.run.run import Run, TrainerLike


def run_for_assignment(trainer: TrainerLike, loader_of: Literal["train", "eval"] | None = None) -> Run:
    """Return the current run, for a program to set an attribute of it.

    Args:
        loader_of: for a dataloader, whether it trains or evaluates

    Raises:
        AttributeError: before the trainer is initialised; or, for a dataloader, while nothing is running, because the
            next run would replace the dataloader
    """
    if "current_run" not in vars(trainer):
        raise AttributeError(f"{type(trainer).__name__}: call super().__init__(...) before setting attributes.")
    if loader_of is not None and not trainer.open_runs:
        raise AttributeError(
            f"{type(trainer).__name__}.{loader_of}_dataloader is the loader of the current run, but nothing is "
            f"running. Store your own loader under another name, and return it from create_{loader_of}_dataloader()."
        )
    return trainer.current_run
