"""A submitit job that is interrupted during training and requeued with the same arguments."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from pytorch_accel_lite import TrainerCallback
from tests.scripts.resumable import run_to_the_end


class SaysThatItTrains(TrainerCallback):
    """Writes the number of the first process to a file when the first step is made."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "trains"

    def on_train_step_end(self, trainer: Any, **kwargs: Any) -> None:
        if trainer.accelerator.is_main_process and not self.file.exists():
            self.file.with_suffix(".new").write_text(str(os.getpid()))
            self.file.with_suffix(".new").rename(self.file)


def train(folder: Path, **saver: Any) -> None:
    """Train slowly in the first run; only training states distinguish the runs."""
    torch.set_num_threads(1)
    delay = 0.0 if any(folder.glob("states/update-*")) else 0.5
    run_to_the_end(folder, delay=delay, extra=(SaysThatItTrains(folder),), save_every_n_steps=None, **saver)


class Submitted:
    """The callable for submitit, which calls it again with the same arguments."""

    def __call__(self, folder: Path) -> None:
        train(folder)

    def checkpoint(self, folder: Path) -> Any:
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, folder)
