"""Training states that programs save themselves: after a run has stopped, and during and after evaluations."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from pytorch_accel_lite import StopTrainingError, Trainer, TrainerCallback
from pytorch_accel_lite.callbacks import EarlyStoppingCallback, SaveTrainingStateCallback
from tests.small_models import Rows, equal_weights, float64_data, float64_model, weights

DATA = float64_data(16)


class Stream(IterableDataset[Any]):
    """The rows in turn, as a stream that counts what has been read."""

    def __iter__(self) -> Iterator[Any]:
        for index in range(len(DATA)):
            yield DATA[index]


class StopAt(TrainerCallback):
    """Stops a run after an update."""

    def __init__(self, update: int) -> None:
        self.update = update

    def on_train_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        if trainer.progress.update == self.update:
            raise StopTrainingError("enough")


def trainer_with(*callbacks: Any) -> Trainer:
    model = float64_model()
    return Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.05, 0.9), callbacks, seed=1)


def trained(data: Dataset[Any], *callbacks: Any, **kwargs: Any) -> Trainer:
    trainer = trainer_with(*callbacks)
    trainer.train(data, 3, DATA, per_device_batch_size=4, **kwargs)
    return trainer


def history_of(trainer: Trainer) -> dict[str, Any]:
    """What the training has recorded."""
    return {name: trainer.run_history[name] for name in ("train_loss_epoch", "eval_loss_epoch")}


THEN = {
    "at once": lambda trainer: None,
    "after evaluate": lambda trainer: trainer.evaluate(DATA, 3),
    "after several evaluations": lambda trainer: [trainer.evaluate(DATA, size) for size in (3, 5)],
    "after predict": lambda trainer: trainer.predict(DATA, 3),
}


@pytest.mark.sampled
@pytest.mark.parametrize("then", THEN)
@pytest.mark.parametrize(
    "data",
    [DATA, Rows(DATA), pytest.param(Stream(), marks=pytest.mark.extension("streams"))],
    ids=lambda data: type(data).__name__,
)
def test_a_state_saved_after_a_stop_resumes_within_the_epoch(data, then, tmp_path, capsys):
    whole = trained(data)
    stopped = trained(data, StopAt(6))
    THEN[then](stopped)
    stopped.save_training_state(tmp_path / "state")
    resumed = trained(data, resume_from=tmp_path / "state")
    assert equal_weights(weights(resumed.model), weights(whole.model))
    assert history_of(resumed) == history_of(whole)
    capsys.readouterr()
    trained(data, StopAt(6), resume_from=tmp_path / "state")
    assert "Nothing left to do: the run was stopped: enough." in capsys.readouterr().out


@pytest.mark.parametrize("then", THEN)
def test_a_state_saved_after_early_stopping_has_nothing_left(then, tmp_path, capsys):
    stopping = EarlyStoppingCallback(1, 10.0)
    stopped = trained(DATA, stopping)
    before = history_of(stopped)
    THEN[then](stopped)
    stopped.save_training_state(tmp_path / "state")
    resumed = trained(DATA, EarlyStoppingCallback(1, 10.0), resume_from=tmp_path / "state")
    assert "Nothing left to do" in capsys.readouterr().out
    assert history_of(resumed) == before


class SaveAt(TrainerCallback):
    """Saves a state once, in the first event of a name after some updates."""

    def __init__(self, folder: Path, event: str, update: int) -> None:
        self.folder, self.update = folder, update
        setattr(self, event, self.act)

    def act(self, trainer: Trainer, **kwargs: Any) -> None:
        if trainer.progress.update == self.update and not self.folder.exists():
            trainer.save_training_state(self.folder)


TWO = {"near": DATA, "far": float64_data(7)}
EVENTS = [
    "on_eval_epoch_start", "on_eval_step_end", "on_eval_epoch_end", "on_train_epoch_end", "on_training_run_epoch_end",
]  # fmt: skip


def all_of(trainer: Trainer) -> dict[str, Any]:
    return {name: trainer.run_history[name] for name in trainer.run_history}


@pytest.mark.sampled
@pytest.mark.parametrize("update", [2, 4, 12])
@pytest.mark.parametrize("event", EVENTS)
def test_a_state_saved_within_an_evaluation_is_of_the_run(event, update, tmp_path):
    """A run resumed from it evaluates once, on the datasets on which the saved run had evaluated, too."""
    if update == 2 and event.startswith("on_train"):
        return  # does not fire within an epoch

    def run(*callbacks: Any, **kwargs: Any) -> Trainer:
        trainer = trainer_with(*callbacks)
        trainer.train(DATA, 3, TWO, 4, evaluate_every="2 updates", **kwargs)
        return trainer

    whole = run()
    run(SaveAt(tmp_path / "state", event, update))
    resumed = run(resume_from=tmp_path / "state")
    assert equal_weights(weights(resumed.model), weights(whole.model))
    assert all_of(resumed) == all_of(whole)


class EvaluateAndSave(SaveAt):
    """Saves a state within an evaluation of its own."""

    def on_eval_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        if trainer.run.outer is not None and not self.folder.exists():
            trainer.save_training_state(self.folder)

    def act(self, trainer: Trainer, **kwargs: Any) -> None:
        if trainer.progress.update == self.update:
            trainer.evaluate(DATA, 3)


@pytest.mark.parametrize("event", ["on_train_step_checkpoint", "on_train_epoch_end", "on_training_run_epoch_end"])
def test_a_state_saved_in_a_nested_evaluation_is_of_the_run(event, tmp_path):
    whole = trained(DATA)
    trained(DATA, EvaluateAndSave(tmp_path / "state", event, 4))
    resumed = trained(DATA, resume_from=tmp_path / "state")
    assert equal_weights(weights(resumed.model), weights(whole.model))
    assert history_of(resumed) == history_of(whole)


@pytest.mark.parametrize("update", [6, 8])
def test_a_run_stopped_between_two_datasets_evaluates_once(update, tmp_path):
    class StopBetween(StopAt):
        def on_eval_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
            if trainer.progress.update == self.update:
                raise StopTrainingError("enough")

        on_train_step_end = TrainerCallback.on_train_step_end

    def run(*callbacks: Any, **kwargs: Any) -> Trainer:
        trainer = trainer_with(*callbacks)
        trainer.train(DATA, 3, TWO, 4, evaluate_every="2 updates", **kwargs)
        return trainer

    whole, saving = run(), SaveTrainingStateCallback(tmp_path / "states")
    stopped = run(StopBetween(update), saving)
    stopped.save_training_state(tmp_path / "by hand")
    for state in (tmp_path / "by hand", tmp_path / f"states/update-{update:09d}"):
        resumed = run(resume_from=state)
        assert equal_weights(weights(resumed.model), weights(whole.model))
        assert all_of(resumed) == all_of(whole)


@pytest.mark.filterwarnings("ignore:The training state holds nothing for the callback")
@pytest.mark.parametrize("seed", [None, 3])
def test_a_run_resumed_from_a_state_without_a_seed_saves_its_own(seed, tmp_path):
    """Within epochs, too, as its ``SaveTrainingStateCallback`` asks for a seed, which the saved run did not need."""

    def fit(name: str, own_seed: int | None, resume_from: Path | None = None) -> Trainer:
        saving = SaveTrainingStateCallback(tmp_path / name, save_every_n_steps=1, max_checkpoints=None)
        model = float64_model()
        optimizer = torch.optim.SGD(model.parameters(), 0.05, 0.9)
        trainer = Trainer(model, nn.MSELoss(), optimizer, [saving], seed=own_seed)
        trainer.train(DATA, 3, per_device_batch_size=4, resume_from=resume_from)
        return trainer

    model = float64_model()
    first = Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.05, 0.9), [])
    first.train(DATA, 1, per_device_batch_size=4)
    first.save_training_state(tmp_path / "by hand")
    whole = fit("whole", seed, tmp_path / "by hand")
    assert whole.run.data.seed is not None
    assert seed in (None, whole.run.data.seed)
    within_epoch = sorted((tmp_path / "whole").glob("update-*"))[1]
    assert equal_weights(weights(fit("resumed", seed, within_epoch).model), weights(whole.model))
