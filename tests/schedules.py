"""Short runs with a schedule, which note their rates, and what tests of schedules check."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accel_lite import Trainer, TrainerCallback
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from pytorch_accel_lite.schedulers import SchedulerBase
from tests.small_models import adamw_trainer, make_data, make_model, weights


def make_optimizer(*rates: float, **kwargs: Any) -> torch.optim.Optimizer:
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates or (0.1, 0.3)]
    return torch.optim.SGD(groups, **kwargs)


def rates(scheduler: SchedulerBase, updates: int = 50) -> list[Any]:
    return [scheduler.get_updated_values(n) for n in range(updates)]


class Noting(TrainerCallback):
    """Records the learning rate of each update, and the weights after it."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.weights: dict[int, dict[str, torch.Tensor]] = {}

    def state_dict(self) -> dict[str, Any]:
        return {}  # it notes what this process does

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    def on_optimizer_step_start(self, trainer, **kwargs):
        self.rates.append(trainer.optimizer.param_groups[0]["lr"])

    def on_train_step_end(self, trainer, **kwargs):
        self.weights[trainer.progress.update] = weights(trainer.get_model())


def run(factory: Any, *callbacks: Any, epochs: int | None = 4, seed: int | None = 5, **kwargs: Any) -> Any:
    """Train for epochs of 3 updates; data are in order, the optimizer has a state."""
    model, noting = make_model(), Noting()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    trainer: Any = Trainer(model, nn.MSELoss(), optimizer, callbacks=[noting, *callbacks], seed=seed)
    trainer.noting = noting
    data = {"train_dataset": make_data(6), "train_dataloader_kwargs": {"shuffle": False}, "per_device_batch_size": 2}
    trainer.train(num_epochs=epochs, create_scheduler_fn=factory, **(data | kwargs))
    return trainer


def saved_run(folder: Path, factory: Any, *callbacks: Any, resume_from: Any = None, **kwargs: Any) -> Any:
    """A run that saves a training state after each update, in ``folder/states``."""
    saving = SaveTrainingStateCallback(folder / "states", save_every_n_steps=1, save_at_end=False)
    return run(factory, saving, *callbacks, resume_from=resume_from, **kwargs)


def check_refused_before_training(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    trainer = adamw_trainer(make_model())
    with pytest.raises(error, match=message):
        trainer.train(make_data(6), 1, **arguments)
    assert trainer.progress.update == 0
