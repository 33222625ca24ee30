"""A trainer whose run has failed resumes in the same program as a new one does: exactly, from any state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accel_lite import Trainer, TrainerCallback
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from tests.small_models import float64_data, listener, same_bits, weights

pytestmark = pytest.mark.extension("user_attributes")
DATA = float64_data(24)


class Adapts(TrainerCallback):
    """Changes once, after a few updates, what later updates depend on."""

    def __init__(self) -> None:
        self.factor, self.seen, self.best = 1.0, [0], None
        self.kept = torch.ones(2)

    def on_update_end(self, trainer: Trainer, **kwargs: Any) -> None:
        if trainer.progress.update != 5:
            return
        self.factor, self.best, self.made = 0.5, 0.1, 2.0
        self.seen.append(5)
        self.kept += 1
        model = trainer.get_model()
        model[1].p = 0.4
        model[0].requires_grad_(True)
        trainer.optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.2})

    def on_optimizer_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
        scale = self.factor * sum(self.kept.tolist()) * len(self.seen) * getattr(self, "made", 1.0)
        for parameter in trainer.get_model().parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.1 * scale)


class Fails(TrainerCallback):
    saves_attributes = False

    def __init__(self, updates: list[int]) -> None:
        self.updates = updates

    def on_update_end(self, trainer: Trainer, **kwargs: Any) -> None:
        if trainer.progress.update in self.updates:
            self.updates.remove(trainer.progress.update)
            raise KeyError("of the user")


def make(folder: Path, failing: list[int]) -> Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.1), nn.Linear(8, 1)).double()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9)
    saving = SaveTrainingStateCallback(folder, save_every="4 updates", max_checkpoints=None)
    return Trainer(model, nn.MSELoss(), optimizer, [Adapts(), saving, Fails(failing)], seed=1)


def train(trainer: Trainer, resume_from: Any = "latest") -> None:
    trainer.train(DATA, 3, per_device_batch_size=6, resume_from=resume_from)


def result(trainer: Trainer) -> Any:
    model, adapts = trainer.get_model(), trainer.callback_handler.callbacks[0]
    held = {name: value for name, value in vars(adapts).items() if not name.startswith("_")}
    return weights(model), trainer.optimizer.state_dict(), model[1].p, held, trainer.run_history.to_dict()


@pytest.mark.parametrize("failing", [[6], [6, 10], [5, 7, 11]])
def test_a_failed_run_resumes_exactly_on_the_same_trainer(tmp_path, failing):
    whole, retried = make(tmp_path / "whole", []), make(tmp_path / "retried", [*failing])
    train(whole)
    for _ in failing:
        with pytest.raises(KeyError):
            train(retried)
    train(retried)
    assert same_bits(result(retried), result(whole))
    resumed = make(tmp_path / "retried", [])  # as in another process
    train(resumed, tmp_path / "retried" / "update-000000008")
    assert same_bits(result(resumed), result(whole))


def test_what_is_set_between_two_runs_stays(tmp_path, capsys):
    trainer = make(tmp_path, [6])
    with pytest.raises(KeyError):
        train(trainer)
    adapts = trainer.callback_handler.callbacks[0]
    assert isinstance(adapts, Adapts)
    adapts.factor = 0.7
    factors: list[float] = []
    look = listener(on_train_step_start=lambda trainer: factors.append(adapts.factor))
    trainer.callback_handler.add_callback(look)
    train(trainer)
    assert factors[0] == 0.7
    assert adapts.best == 0.1
    assert adapts.seen == [0, 5]
    assert "Adapts.factor is 0.7, and was 1.0. The new values hold." in " ".join(capsys.readouterr().out.split())


def test_a_new_run_says_that_the_trainer_has_trained(tmp_path, capsys):
    trainer = make(tmp_path, [2])
    with pytest.raises(KeyError):
        train(trainer)
    assert "already" not in capsys.readouterr().out
    train(trainer)
    assert "starting a new run, with the weights that this trainer has trained already" in capsys.readouterr().out
