"""Starting events of a resumed run: what they change is changed once, and states keep it."""

from __future__ import annotations

import math
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accel_lite import StopTrainingError, Trainer, callbacks
from pytorch_accel_lite.callbacks import RunPausedError, SaveTrainingStateCallback
from pytorch_accel_lite.checkpoint.disk.checksums import checksum
from tests.scripts.resumable import run, saved_states
from tests.small_models import (
    adamw_trainer,
    assert_same,
    equal_weights,
    float64_data,
    float64_model,
    listener,
    make_trainer,
    raises_at,
    train,
    weights,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*")


def hashes(folder: Path) -> dict[Path, str]:
    return {path: checksum(path) for state in saved_states(folder) for path in sorted(state.iterdir())}


@pytest.mark.sampled
@pytest.mark.extension("model_ema")
@pytest.mark.slow
@pytest.mark.parametrize("event", ["on_training_run_start", "on_train_epoch_start"])
@pytest.mark.parametrize("update", [4, 6])
def test_a_run_stopped_by_a_starting_event_resumes_its_bits(tmp_path, capsys, event, update):
    def stop(trainer, **kwargs):
        raise StopTrainingError("no time left")

    def average():
        return callbacks.ModelEmaCallback(0.9, save_path=None)

    kept, whole = average(), average()
    uninterrupted = run(tmp_path / "whole", extra=(whole,))
    run(tmp_path, extra=(average(), raises_at(update, RunPausedError("paused"), "on_train_step_checkpoint")))
    before = hashes(tmp_path)
    stopped = run(tmp_path, extra=(kept, listener(**{event: stop})))
    assert stopped["progress"]["update"] == kept.ema.num_updates == update
    assert hashes(tmp_path) == before
    said = capsys.readouterr().out
    assert "the run was stopped before it had taken a step of its own" in said
    assert "No best model was saved" not in said
    assert_same(run(tmp_path, extra=(kept,)), uninterrupted)
    assert equal_weights(kept.ema.module.state_dict(), whole.ema.module.state_dict())


def _halve_rates(trainer, **kwargs):
    for group in trainer.optimizer.param_groups:
        group["lr"] *= 0.5


def _shrink_weights(trainer, **kwargs):
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(0.5)


def _load_pretrained(trainer, **kwargs):
    trainer.get_model().load_state_dict(float64_model(4).state_dict())


def _forget_momentum(trainer, **kwargs):
    trainer.optimizer.state.clear()


@pytest.mark.sampled
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(
    ("event", "change"),
    [
        ("on_train_epoch_start", _halve_rates),
        ("on_train_epoch_start", _shrink_weights),
        ("on_train_epoch_start", _forget_momentum),
        ("on_training_run_start", _load_pretrained),
    ],
)
def test_starting_events_change_a_run_once_if_it_is_resumed(tmp_path, event, change, accumulation):
    def train_until(update: int | None, **kwargs: Any) -> Trainer:
        saving = SaveTrainingStateCallback(tmp_path / "states", save_every_n_steps=1)
        stop = raises_at(update, RunPausedError("paused"), "on_train_step_checkpoint")
        trainer = adamw_trainer(float64_model(3), callbacks=[listener(**{event: change}), saving, stop], seed=1)
        trainer.train(float64_data(12), 2, None, 2, gradient_accumulation_steps=accumulation, **kwargs)
        return trainer

    whole = train_until(None)
    shutil.rmtree(tmp_path / "states")
    last = whole.progress.update
    for update in (2, last // 2, last - 1, None):  # within and at the end of epochs
        resumed = train_until(update, resume_from="latest")
    assert equal_weights(resumed.model.state_dict(), whole.model.state_dict())
    assert resumed.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"]


def test_overridden_starting_methods_change_a_resumed_run_once(tmp_path, capsys):
    class Changing(Trainer):
        def training_run_start(self):
            _load_pretrained(self)

        def train_epoch_start(self):
            super().train_epoch_start()
            _halve_rates(self)

    def train_until(update: int | None, **kwargs: Any) -> Trainer:
        saving = SaveTrainingStateCallback(tmp_path / "states", save_every_n_steps=1)
        stop = raises_at(update, RunPausedError("paused"), "on_train_step_checkpoint")
        model = float64_model(3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        trainer = Changing(model, nn.MSELoss(), optimizer, [saving, stop], seed=1)
        trainer.train(float64_data(12), 2, None, 2, **kwargs)
        return trainer

    whole = train_until(None)
    shutil.rmtree(tmp_path / "states")
    train_until(8)
    resumed = train_until(None, resume_from="latest")
    assert equal_weights(resumed.model.state_dict(), whole.model.state_dict())
    assert "The starting events have changed" in capsys.readouterr().out


def _do_nothing(trainer, **kwargs):
    pass


class OwnEpochs(Trainer):
    """Has a loop of its own for the steps of an epoch, and code that runs at the start."""

    def _run_train_epoch(self, loader):
        for x, y in loader:
            self.loss_func(self.model(x), y).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def training_run_start(self):
        pass


def test_epochs_after_a_resumed_one_count_with_an_own_loop(tmp_path):
    train(make_trainer([SaveTrainingStateCallback(tmp_path, save_every_n_steps=2)], seed=0), epochs=1)
    state = min(path for path in tmp_path.iterdir() if path.is_dir())
    trainer = make_trainer(trainer_class=OwnEpochs, seed=0)
    seen = listener(on_epoch_checkpoint=lambda t: ends.append({n: w.clone() for n, w in weights(t.model).items()}))
    ends: list[dict[str, torch.Tensor]] = []
    trainer.callback_handler.add_callback(seen)
    train(trainer, epochs=3, resume_from=state)
    assert len(ends) == 3
    assert not equal_weights(ends[1], ends[2])
    assert equal_weights(ends[-1], weights(trainer.model))


def test_what_an_overridden_load_training_state_loads_is_kept(tmp_path, capsys):
    class Loads(Trainer):
        def load_training_state(self, input_dir):
            found = super().load_training_state(input_dir)
            nn.init.constant_(self.model[2].bias, 7.0)
            return found

    seen: list[float] = []

    def look(trainer, **kwargs):
        seen.append(trainer.model[2].bias.item())

    def train_with(update: int | None, **kwargs: Any) -> None:
        model = float64_model(3)
        saving = SaveTrainingStateCallback(tmp_path / "states", save_every_n_steps=1)
        stop = raises_at(update, RunPausedError("paused"), "on_train_step_checkpoint")
        events = listener(on_training_run_start=_do_nothing, on_train_step_start=look)
        trainer = Loads(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.01), [saving, stop, events])
        trainer.train(float64_data(12), 2, None, 2, **kwargs)

    train_with(4)
    seen.clear()
    train_with(None, resume_from="latest")
    assert seen[0] == 7.0
    assert "The starting events have changed" not in capsys.readouterr().out


class PlainDescent:
    """An optimizer of no library, without a state, one of whose options cannot be copied."""

    def __init__(self, parameters: Any) -> None:
        self.param_groups = [{"params": [*parameters], "lr": 0.01, "lock": threading.Lock()}]

    def step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.data.sub_(parameter.grad, alpha=self.param_groups[0]["lr"])

    def zero_grad(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        groups = [{"params": [*range(len(group["params"]))], "lr": group["lr"]} for group in self.param_groups]
        return {"state": {}, "param_groups": groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.param_groups[0]["lr"] = state["param_groups"][0]["lr"]


def test_unusual_weights_and_optimizers_resume_their_bits(tmp_path, capsys):
    def train_until(update: int | None, **kwargs: Any) -> Trainer:
        model = float64_model(3)
        model.register_buffer("neighbours", torch.eye(3).to_sparse())
        model.unknown = nn.Parameter(torch.tensor([1.0, math.nan]), requires_grad=False)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        saving = SaveTrainingStateCallback(tmp_path / "states", save_every_n_steps=1)
        stop = raises_at(update, RunPausedError("paused"), "on_train_step_checkpoint")
        callbacks = [listener(on_train_epoch_start=_do_nothing), saving, stop]
        trainer = Trainer(model, nn.MSELoss(), PlainDescent(trained), callbacks, seed=1)
        trainer.train(float64_data(12), 2, None, 2, **kwargs)
        return trainer

    whole = train_until(None)
    shutil.rmtree(tmp_path / "states")
    train_until(8)
    resumed = train_until(None, resume_from="latest")
    assert equal_weights(*({n: p.nan_to_num() for n, p in t.model.named_parameters()} for t in (resumed, whole)))
    assert "The starting events have changed" not in capsys.readouterr().out


def test_rates_set_at_the_start_of_a_resumed_run_hold(tmp_path):
    def train_with(rate: float, update: int | None, **kwargs: Any) -> Trainer:
        def set_rate(trainer, **kwargs):
            trainer.optimizer.param_groups[0]["lr"] = rate

        saving = SaveTrainingStateCallback(tmp_path / "states", save_every_n_steps=1)
        stop = raises_at(update, RunPausedError("paused"), "on_train_step_checkpoint")
        callbacks = [listener(on_training_run_start=set_rate), saving, stop]
        trainer = adamw_trainer(float64_model(3), callbacks=callbacks, seed=1)
        trainer.train(float64_data(12), 2, None, 2, **kwargs)
        return trainer

    train_with(0.01, 4)
    resumed = train_with(0.5, None, resume_from="latest")
    assert resumed.optimizer.param_groups[0]["lr"] == 0.5
