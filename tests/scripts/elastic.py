"""Drawn tasks that one job saves in the middle of an epoch, and another one, of other processes and batch sizes, ends.

torchrun ... elastic.py save|resume FOLDER
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import torch
from torch import nn

from pytorch_accel_lite import StopTrainingError, Trainer, TrainerCallback
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from tests.scripts.resumable import OrderCallback
from tests.tasks import Rows, regression_data


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


def train(folder: Path, size: int, batch: int, accumulation: int, stop: int, resume: Path | None) -> list[int]:
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


def main() -> None:
    torch.set_num_threads(1)
    mode, folder = sys.argv[1], Path(sys.argv[2])
    draws, results = random.Random(7), []
    for number in range(15):
        size, batch, other = draws.randint(9, 60), draws.randint(1, 4), draws.randint(1, 9)
        accumulation, others = draws.randint(1, 3), draws.randint(1, 3)
        updates = -(-size // (2 * batch * accumulation))
        stop = draws.randint(1, max(updates - 1, 1))
        target = folder / f"task{number}"
        if mode == "save":
            torch.save(train(target, size, batch, accumulation, stop, None), folder / f"before{number}.pt")
            continue
        (state,) = target.glob("update-*")
        before = torch.load(folder / f"before{number}.pt")
        everything = train(folder, size, other, others, -1, state)
        results.append((size, before, everything[len(before) :]))
        assert everything[: len(before)] == before
    if mode == "resume":
        torch.save(results, folder / f"on{os.environ['WORLD_SIZE']}.pt")


if __name__ == "__main__":
    main()
