"""Training states of several processes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pytorch_accel_lite import StopTrainingError, Trainer, TrainerCallback
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from tests.cases.common import world_size
from tests.scripts.resumable import CopyStates, OrderCallback, run
from tests.tasks import Rows, regression_data


def every_save_point(folder: Path, accumulation: int) -> Any:
    """A whole run, and one resumed from every state that it saved."""
    # On 3 processes no share has one sample: batch norm takes none of them.
    kwargs = {"accumulation": accumulation, "save_every_n_epochs": 1, "size": 24 if world_size() == 3 else 22}
    results = [run(folder, resume_from=None, extra=(CopyStates(folder),), **kwargs)]
    for copy in sorted((folder / "copies").glob("*/update-*")):
        torch.manual_seed(99)
        results.append(run(folder / f"again-{copy.parent.name}", resume_from=copy, **kwargs))
    return results


class Indexed(Rows):
    def __getitem__(self, index):
        return *super().__getitem__(index), torch.tensor(index)


class Stops(TrainerCallback):
    def __init__(self, update):
        self.update = update

    def on_train_step_end(self, trainer, **kwargs):
        if trainer.progress.update == self.update:
            raise StopTrainingError("enough")


class OfThree(Trainer):
    def calculate_train_batch_loss(self, batch):
        return super().calculate_train_batch_loss(batch[:2])


def _train(folder: Path, size: int, batch: int, accumulation: int, stop: int, resume: Path | None) -> list[int]:
    """Train one epoch, or what is left of it, and return the samples of all steps of all ranks."""
    torch.manual_seed(0)
    model, order = nn.Linear(5, 1).double(), OrderCallback()
    saving = SaveTrainingStateCallback(folder, save_every_n_steps=1, save_at_end=False, max_checkpoints=1)
    callbacks = [order, *([saving] if resume is None else []), Stops(stop)]
    trainer = OfThree(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.01), callbacks, seed=size)
    trainer.train(
        Indexed(regression_data(size)),
        1,
        per_device_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        resume_from=resume,
    )
    return [sample for step in order.order for sample in step]


def _drawn_tasks() -> Any:
    draws = random.Random(7)
    for number in range(15):
        size, batch, other = draws.randint(9, 60), draws.randint(1, 4), draws.randint(1, 9)
        accumulation, others = draws.randint(1, 3), draws.randint(1, 3)
        updates = -(-size // (2 * batch * accumulation))
        yield number, size, (batch, accumulation, draws.randint(1, max(updates - 1, 1))), (other, others)


def save_in_mid_epoch(folder: Path) -> list[list[int]]:
    """The samples that each of the drawn tasks had had when it was stopped."""
    return [_train(folder / f"task{number}", size, *before, None) for number, size, before, _ in _drawn_tasks()]


def resume_in_mid_epoch(folder: Path) -> list[tuple[int, list[int]]]:
    """The size of each task, and its samples with those before, in a job of other processes and batch sizes."""
    results = []
    for number, size, _, after in _drawn_tasks():
        (state,) = folder.glob(f"task{number}/update-*")
        results.append((size, _train(folder, size, *after, -1, state)))
    return results
