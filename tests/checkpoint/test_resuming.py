"""Resuming: a run continues from each of its training states to the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

from pytorch_accel_lite import Trainer, callbacks
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from pytorch_accel_lite.extending import SETTINGS_RECORDER, SettingsRecorder
from tests.launching import SOAK, some_of
from tests.ranks import world_size
from tests.scripts.resumable import CopyStates, make_model, run
from tests.small_models import (
    assert_same,
    equal_weights,
    float64_data,
    float64_model,
    listener,
    make_trainer,
    same_bits,
    train,
    weights,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*")


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize(("accumulation", "workers", "seed"), [(3, 2, 5), *[(1, 0, 5), (2, 0, None)] * SOAK])
def test_from_every_save_point_a_run_resumes_to_the_same_bits(tmp_path, accumulation, workers, seed):
    kwargs = {"accumulation": accumulation, "workers": workers, "seed": seed, "save_every_n_epochs": 1}
    torch.manual_seed(1)
    whole = run(tmp_path, resume_from=None, extra=(CopyStates(tmp_path),), **kwargs)
    copies = sorted((tmp_path / "copies").glob("*/update-*"))
    assert len(copies) == whole["progress"]["update"] + 3
    for copy in some_of(copies):
        torch.manual_seed(99)
        resumed = run(tmp_path / f"again-{copy.parent.name}", resume_from=copy, **kwargs)
        assert_same(resumed, whole)


class OwnLoader:
    """A loader of the user's own, the same in every epoch."""

    def __init__(self, data, size):
        self.batches = [data[i : i + size] for i in range(0, len(data), size)]

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


class WithOwnLoader(Trainer):
    def create_train_dataloader(self, batch_size, train_dl_kwargs=None):
        return OwnLoader(self.train_dataset, batch_size)


@pytest.mark.sampled
@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["in memory", *(pytest.param(kind, marks=pytest.mark.extension("streams")) for kind in ("stream", "own"))]
)
@pytest.mark.parametrize("limit", [None, *[pytest.param(3, marks=pytest.mark.extension("pytorch_accelerated"))] * SOAK])
def test_a_run_with_dropout_resumes_its_bits_from_any_data(tmp_path, kind, limit):
    """The generators are restored, also after earlier samples were read again and dropped."""

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(data)

    data = float64_data(22)
    sets = {"in memory": data, "stream": Stream(), "own": data}

    def train(folder, resume_from=None):
        model = make_model()
        saving = SaveTrainingStateCallback(folder / "states", 1, 1)
        limits = [callbacks.LimitBatchesCallback(limit)] if limit else []
        kind_of_trainer = WithOwnLoader if kind == "own" else Trainer
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        listeners = [saving, CopyStates(folder), *limits]
        trainer = kind_of_trainer(model, torch.nn.MSELoss(), optimizer, listeners, seed=5)
        kwargs = {"shuffle": False} if kind == "stream" else None
        trainer.train(sets[kind], 2, None, 4, train_dataloader_kwargs=kwargs, resume_from=resume_from)
        assert trainer.progress.update == 2 * (limit or 6)
        return model.state_dict(), trainer.run_history.to_dict()

    weights, history = train(tmp_path)
    for copy in some_of(sorted((tmp_path / "copies").glob("*/update-*"))):
        again = train(tmp_path / f"again-{copy.parent.name}", copy)
        assert again[1] == history
        assert equal_weights(again[0], weights)


def test_saving_does_not_change_the_run(tmp_path):
    often = run(tmp_path / "often", resume_from=None)
    never = run(tmp_path / "never", resume_from=None, save_every_n_steps=None, save_at_end=False)
    assert_same(never, often)
    assert not list((tmp_path / "never").glob("states/update-*"))


def whole_run_and_resumed_ones(folder: Path, accumulation: int) -> Any:
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


@pytest.mark.soak
@pytest.mark.processes
@pytest.mark.parametrize(("processes", "accumulation"), [(2, 3), *[(2, 1), (3, 2), (3, 1)] * SOAK])
def test_processes_resume_the_same_bits_from_every_save_point(tmp_path, job, processes, accumulation):
    runs = job(processes).run(whole_run_and_resumed_ones, tmp_path, accumulation)
    assert len(runs) == processes
    for whole, *resumed in runs:  # of each rank: its generators are its own
        assert len(resumed) >= 2
        for again in resumed:
            assert again["processes"] == processes
            assert_same(again, whole)


def resumes_several_buckets(folder: Path) -> bool:
    """Whether a resumed run ends with the weights of the whole one, if DDP has several buckets of gradients."""

    def train_large(resume_from: Path | None) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(300, 300) for _ in range(6)], nn.Linear(300, 1))  # more than 1 MiB
        saving = SaveTrainingStateCallback(folder, save_every_n_epochs=None, save_every_n_steps=2, save_at_end=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        trainer = Trainer(model, nn.MSELoss(), optimizer, [saving] if resume_from is None else [])
        data = TensorDataset(torch.randn(36, 300), torch.randn(36, 1))
        trainer.train(data, 1, per_device_batch_size=3, resume_from=resume_from)
        return trainer.get_model().state_dict()

    return equal_weights(train_large(None), train_large(folder / "update-000000002"))


@pytest.mark.processes
def test_three_processes_resume_ddp_in_the_same_bits(tmp_path, job):
    """The wrapper rearranges its buckets after its first backward pass, and so the order of the sums."""
    assert job(3).run(resumes_several_buckets, tmp_path) == [True] * 3


class CountsForwards(nn.Linear):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


class CountsLossCalls:
    """A loss function that counts its calls."""

    number = 0

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.number += 1
        return nn.functional.mse_loss(outputs, targets)


class DividesByMeanLoss(Trainer):
    """Divides its losses by their running mean."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.mean = torch.ones(())
        self.losses: list[float] = []

    def calculate_train_batch_loss(self, batch):
        output = super().calculate_train_batch_loss(batch)
        self.mean.mul_(0.5).add_(output["loss"].detach(), alpha=0.5)
        self.losses.append(output["loss"].item())
        self.run_history.update_metric("step", self.progress.step)
        return {**output, "loss": output["loss"] / self.mean}


def resumes_attributes_that_steps_change(folder: Path) -> bool:
    """Whether attributes that each step changes are the same after a run, and after resuming it."""
    results = []
    for resume_from in (None, folder / "update-000000002"):
        model, loss_func = nn.Sequential(CountsForwards(4, 1)), CountsLossCalls()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        saving = SaveTrainingStateCallback(folder, save_every_n_steps=1, save_at_end=False, max_checkpoints=None)
        trainer = DividesByMeanLoss(model, loss_func, optimizer, [saving] if resume_from is None else [])
        train(trainer, size=24, resume_from=resume_from)
        found = trainer.mean, trainer.losses, model[0].calls, loss_func.number, trainer.run_history.to_dict()
        results.append((found, weights(model)))
    return same_bits(*results)


@pytest.mark.processes
def test_three_processes_resume_what_each_step_changes(tmp_path, job):
    assert job(3).run(resumes_attributes_that_steps_change, tmp_path) == [True] * 3


def test_resuming_a_finished_run_says_that_nothing_is_left(tmp_path, capsys):
    whole = run(tmp_path)
    assert_same(run(tmp_path), whole)
    assert "Nothing left to do: the run had finished. Increase num_epochs to" in capsys.readouterr().out


def test_a_finished_run_names_the_limit_that_has_ended_it(tmp_path, capsys):
    for _ in range(2):
        saving = SaveTrainingStateCallback(tmp_path)
        train(make_trainer([saving], seed=0), epochs=2, max_num_train_steps=2, resume_from="latest")
    assert "Nothing left to do: the run had finished. Increase max_num_train_steps to" in capsys.readouterr().out


class SeedRecorder(SettingsRecorder):
    """Records and compares the seed, and the rates before and after loading."""

    def record(self, trainer: Any, reads_data: bool = True) -> dict[str, Any]:
        return {"seed": trainer.seed}

    def compare(self, trainer: Any, state: Any, now: dict[str, Any], attributes: Any) -> str:
        before = json.loads(state.shared["settings"] or "{}").get("seed", "not recorded")
        return f"The seed was {before}, and is {now['seed']}."

    def optimizer_options(self, trainer: Any) -> dict[str, str]:
        return {"lr": f"{trainer.optimizer.param_groups[0]['lr']}"}

    def describe_loaded(self, trainer: Any, before: Any, source: str) -> str:
        return f"The rate was {before['lr']}, and {source} has {self.optimizer_options(trainer)['lr']}."


def test_a_recorder_of_settings_is_asked_what_has_changed(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(SETTINGS_RECORDER, "content", SeedRecorder())
    train(make_trainer([SaveTrainingStateCallback(tmp_path / "run")], seed=1)).save_training_state(tmp_path / "state")
    assert torch.load(tmp_path / "state/trainer.pt", weights_only=True)["settings"] == '{"seed": 1}'
    train(make_trainer(seed=2), 2, resume_from=tmp_path / "run/update-000000003")
    assert "The seed was 1, and is 2." in capsys.readouterr().out.splitlines()
    model = float64_model(1, 4, torch.float32)
    other = make_trainer(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5))
    other.load_training_state(tmp_path / "state")
    assert f"The rate was 0.5, and {tmp_path / 'state'} has 0.1." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("first", "then", "said"),
    [
        pytest.param(None, None, [], id="never"),
        pytest.param(None, SeedRecorder(), ["The seed was not recorded, and is 2."], id="only afterwards"),
        pytest.param(SeedRecorder(), None, [], id="only before"),
    ],
)
def test_states_resume_with_and_without_a_recorder(tmp_path, capsys, monkeypatch, first, then, said):
    monkeypatch.setattr(SETTINGS_RECORDER, "content", first)
    train(make_trainer([SaveTrainingStateCallback(tmp_path)], seed=1))
    capsys.readouterr()
    monkeypatch.setattr(SETTINGS_RECORDER, "content", then)
    resumed = train(make_trainer(seed=2), 2, resume_from=tmp_path / "update-000000003")
    assert resumed.progress.epochs_completed == 2
    assert [line for line in capsys.readouterr().out.splitlines() if "seed" in line] == said


def test_a_long_history_is_resumed_unchanged(tmp_path):
    odd = [1.5, 2, True, False, 2**70, float("nan"), "text"]

    def record(trainer: Any) -> None:
        history, epoch = trainer.run_history, trainer.progress.epoch
        for name, value in (("float", 0.1 * epoch), ("int", epoch), ("huge", 2**62 + epoch), ("odd", odd[epoch % 7])):
            history.update_metric(name, value)

    def run(epochs: int, **kwargs: Any) -> Any:
        saving = SaveTrainingStateCallback(tmp_path, max_checkpoints=1)
        trainer = make_trainer([listener(on_train_epoch_end=record), saving])
        return train(trainer, epochs, size=2, **kwargs).run_history

    run(20)
    resumed, whole = run(21, resume_from="latest"), run(21)
    for name in whole:
        assert [*map(repr, resumed[name])] == [*map(repr, whole[name])]
    assert resumed.rows()[:-1] == resumed.rows()[:20]
    assert resumed.rows(20) == resumed.rows()[19:]
