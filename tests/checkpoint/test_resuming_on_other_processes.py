"""Resuming within an epoch, on another number of processes and with other batch sizes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from pytorch_accel_lite import StopTrainingError, Trainer
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from tests.launching import SOAK
from tests.scripts.resumable import OrderCallback
from tests.small_models import Rows, float64_data, raises_at


class WithIndices(Rows):
    """Each sample with its index."""

    def __getitem__(self, index):
        return *super().__getitem__(index), torch.tensor(index)


class IgnoresIndices(Trainer):
    def calculate_train_batch_loss(self, batch):
        return super().calculate_train_batch_loss(batch[:2])


class Task(NamedTuple):
    """A run over some samples, which is saved after each update, stopped, and resumed with other settings."""

    name: str
    size: int
    before: dict[str, int]
    last_update: int
    after: dict[str, int]


def drawn_tasks() -> list[Task]:
    draws = random.Random(7)
    tasks = []
    for number in range(15 if SOAK else 6):
        size, batch, other_batch = draws.randint(9, 60), draws.randint(1, 4), draws.randint(1, 9)
        accumulation, other_accumulation = draws.randint(1, 3), draws.randint(1, 3)
        updates = -(-size // (2 * batch * accumulation))
        before = {"per_device_batch_size": batch, "gradient_accumulation_steps": accumulation}
        after = {"per_device_batch_size": other_batch, "gradient_accumulation_steps": other_accumulation}
        tasks.append(Task(f"task{number}", size, before, draws.randint(1, max(updates - 1, 1)), after))
    return tasks


def samples_trained_on(size: int, settings: dict[str, int], *listeners: Any, resume_from: Path | None) -> list[int]:
    """Train one epoch, or the rest of it, and return the samples of all steps and ranks."""
    torch.manual_seed(0)
    model, order = nn.Linear(5, 1).double(), OrderCallback()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = IgnoresIndices(model, nn.MSELoss(), optimizer, [order, *listeners], seed=size)
    trainer.train(WithIndices(float64_data(size)), 1, **settings, resume_from=resume_from)
    return [sample for step in order.order for sample in step]


def save_in_mid_epoch(folder: Path) -> list[list[int]]:
    """The samples that each of the drawn tasks had had when it was stopped."""
    samples = []
    for task in drawn_tasks():
        saving = SaveTrainingStateCallback(
            folder / task.name, save_every_n_steps=1, save_at_end=False, max_checkpoints=1
        )
        stop = raises_at(task.last_update, StopTrainingError("enough"))
        samples.append(samples_trained_on(task.size, task.before, saving, stop, resume_from=None))
    return samples


def resume_in_mid_epoch(folder: Path) -> list[list[int]]:
    """The samples of each task, with those before, in a job of other processes and batch sizes."""
    samples = []
    for task in drawn_tasks():
        (state,) = folder.glob(f"{task.name}/update-*")
        samples.append(samples_trained_on(task.size, task.after, resume_from=state))
    return samples


@pytest.mark.thorough
@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:The training state holds the state of callback")
@pytest.mark.processes
def test_an_epoch_resumes_on_other_processes_and_batch_sizes(tmp_path, job):
    """Drawn sizes, batch sizes and moments: saved by 2 processes, resumed by 1 and 3 with what was not yet seen."""
    saved, _ = job(2).run(save_in_mid_epoch, tmp_path)
    runs = [resume_in_mid_epoch(tmp_path)]
    for processes in (3, 2) if SOAK else (3,):
        runs += job(processes).run(resume_in_mid_epoch, tmp_path)
    for resumed in runs:
        for task, before, everything in zip(drawn_tasks(), saved, resumed, strict=True):
            assert before, "it was saved within the epoch"
            assert everything[: len(before)] == before
            assert sorted(everything) == list(range(task.size))
