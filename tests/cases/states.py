"""Training states of several processes."""

from __future__ import annotations

import contextlib
import io
import os
import random
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from pytorch_accel_lite import StopTrainingError, Trainer, TrainerCallback
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from tests.cases.common import world_size
from tests.launching import SOAK, some_of
from tests.scripts.resumable import CopyStates, OrderCallback, run
from tests.tasks import Rows, listener, make_trainer, regression_data, train


def every_save_point(folder: Path, accumulation: int) -> Any:
    """A whole run, and one resumed from every third state that it saved; from every one with SOAK."""
    # On 3 processes no share has one sample: batch norm takes none of them.
    kwargs = {"accumulation": accumulation, "save_every_n_epochs": 1, "size": 24 if world_size() == 3 else 22}
    results = [run(folder, resume_from=None, extra=(CopyStates(folder),), **kwargs)]
    copies = sorted((folder / "copies").glob("*/update-*"))
    assert len(copies) == results[0]["progress"]["update"] + 3
    for copy in some_of(copies):  # within epochs and at their ends
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
    for number in range(15 if SOAK else 6):
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


SAMPLES = 60
EPOCHS = 4


class Rates(TrainerCallback):
    """Notes the rate that each update is made with, and the fraction of the run at which it is made."""

    def __init__(self) -> None:
        self.curve: list[tuple[float, float]] = []

    def on_optimizer_step_start(self, trainer, **kwargs):
        group = trainer.optimizer.param_groups[0]
        done = trainer.progress.epochs_completed + (trainer.progress.samples_in_epoch - 1) / SAMPLES
        self.curve.append((done, float(group["lr"])))


@dataclass
class Trained:
    """A run with a schedule. Places in its curve are in epochs, of samples."""

    trainer: Trainer
    states: Path
    curve: list[tuple[float, float]]

    @property
    def rates(self) -> list[float]:
        return [rate for _, rate in self.curve]

    @property
    def last_rate(self) -> float:
        return float(self.trainer.optimizer.param_groups[0]["lr"])

    @property
    def per_epoch(self) -> int:
        return self.trainer.run_config.num_update_steps_per_epoch


def trained_with(
    create: Any,
    batch: int,
    accumulation: int,
    folder: Path,
    trainer_class: type[Trainer] = Trainer,
    resume: Path | None = None,
    *,
    save_every: int = 1000,
    save_epochs: int | None = None,
    epochs: int | None = EPOCHS,
    **kwargs: Any,
) -> Trained:
    """Train with a schedule, from a state if one is given, and save a state every few updates."""
    torch.manual_seed(0)
    model, rates = nn.Linear(5, 1).double(), Rates()
    saving = SaveTrainingStateCallback(folder / "states", save_epochs, save_every, save_at_end=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = trainer_class(model, nn.MSELoss(), optimizer, [rates, saving], seed=3)
    trainer.train(
        regression_data(SAMPLES),
        epochs,
        per_device_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        create_scheduler_fn=create,
        resume_from=resume,
        **kwargs,
    )
    return Trained(trainer, folder / "states", rates.curve)


def save_with_schedule(folder: Path, name: str) -> None:
    from tests.test_elastic_schedules import factory_of

    create, trainer_class = factory_of(name)
    trained_with(create, 4, 1, folder / "first", trainer_class, save_every=11)


def resume_with_schedule(folder: Path, name: str, state: Path) -> Any:
    """Its rates, and the last."""
    from tests.test_elastic_schedules import factory_of

    create, trainer_class = factory_of(name)
    trained = trained_with(create, 4, 1, folder / f"on-{world_size()}", trainer_class, state)
    return {"rates": trained.rates, "last": trained.last_rate}


def fail_while_a_state_is_written(folder: Path) -> str:
    """What is printed when both processes fail in the update after a state that is not yet complete."""
    assert world_size() == 2
    may_end, sync, output = threading.Event(), os.fsync, io.StringIO()

    def waiting_sync(descriptor: int) -> None:
        if "update-000000004" in os.readlink(f"/proc/self/fd/{descriptor}"):
            assert may_end.wait(120)
        sync(descriptor)

    def fail(trainer: Trainer) -> None:
        if trainer.progress.update == 5:
            raise RuntimeError("broken")

    saving = SaveTrainingStateCallback(folder, save_every_n_steps=2, asynchronous=True)
    trainer = make_trainer([saving, listener(on_train_step_start=fail)])
    with patch.object(os, "fsync", waiting_sync), contextlib.redirect_stdout(output):
        try:
            with contextlib.suppress(RuntimeError):
                train(trainer, size=40)
        finally:
            may_end.set()
            for thread in threading.enumerate():
                if thread.name == "training-state-writer":
                    thread.join(120)
    assert trainer.progress.update == 5
    return output.getvalue()
