"""The files of training states: damage, stores and what may not be stored."""

from __future__ import annotations

import contextlib
import enum
import os
import pickle
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from pytorch_accel_lite import Trainer, TrainerCallback
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from pytorch_accel_lite.checkpoint import DamagedStateError, verify_state
from pytorch_accel_lite.data import OwnShard
from pytorch_accel_lite.extending import STORES, Ranks, manifest_text, read_state, read_verified, write_files
from tests.launching import some_of
from tests.ranks import rank as own_rank
from tests.ranks import shared_folder
from tests.scripts.resumable import run, saved_states
from tests.small_models import (
    adamw_trainer,
    assert_same,
    changed_manifest,
    equal_weights,
    float64_data,
    float64_model,
    make_data,
    make_trainer,
    train,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*")


DAMAGES = {
    "emptied": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "flipped": lambda path: path.write_bytes(
        path.read_bytes()[: path.stat().st_size // 2]
        + bytes([path.read_bytes()[path.stat().st_size // 2] ^ 1])
        + path.read_bytes()[path.stat().st_size // 2 + 1 :]
    ),
    "removed": lambda path: path.unlink(),
}
FILES = ["model.safetensors", "trainer.pt", "rank00000.pt", "manifest.json"]


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize(("name", "damage"), some_of(product(FILES, DAMAGES)))
def test_damage_is_found_and_the_state_before_is_used(tmp_path, name, damage, capsys):
    whole = run(tmp_path)
    *_, before, newest = saved_states(tmp_path)
    DAMAGES[damage](newest / name)
    with pytest.raises(DamagedStateError, match=name):
        verify_state(newest)
    assert_same(run(tmp_path), whole)
    output = capsys.readouterr().out
    assert f"{newest}" in output
    assert f"Resuming from '{before}'" in output


def test_damaged_states_without_an_intact_one_are_an_error(tmp_path):
    run(tmp_path, max_checkpoints=2)
    for state in saved_states(tmp_path):
        DAMAGES["truncated"](state / "trainer.pt")
    with pytest.raises(DamagedStateError, match=r"All training states in .* are damaged"):
        run(tmp_path)


class Transposed(torch.nn.Module):
    """Has a weight that is another one transposed, in the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = torch.nn.Linear(4, 3, bias=False)
        self.decode = torch.nn.Linear(3, 4, bias=False)
        self.decode.weight = torch.nn.Parameter(self.encode.weight.data.t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(x)).sum(1, keepdim=True)


def test_weights_that_share_memory_in_another_order_are_saved(tmp_path):
    def new() -> Trainer:
        return make_trainer([SaveTrainingStateCallback(tmp_path / "states")], Transposed())

    trainer = train(new())
    trainer.save_model(tmp_path / "model.safetensors")
    trained = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    other = new()
    other.load_checkpoint(tmp_path / "model.safetensors")
    assert equal_weights(other.model.state_dict(), trained)
    assert equal_weights(train(new(), resume_from="latest").model.state_dict(), trained)


def test_a_state_whose_manifest_is_a_directory_is_damaged(tmp_path, capsys):
    whole = run(tmp_path)
    *_, before, newest = saved_states(tmp_path)
    (newest / "manifest.json").unlink()
    (newest / "manifest.json").mkdir()
    assert_same(run(tmp_path), whole)
    output = capsys.readouterr().out
    assert f"Skipping a damaged training state. '{newest}/manifest.json' is damaged: " in output
    assert f"Resuming from '{before}'" in output


def test_a_run_that_cannot_begin_releases_its_directory(tmp_path):
    run(tmp_path, max_checkpoints=1)
    (state,) = saved_states(tmp_path)
    DAMAGES["truncated"](state / "trainer.pt")
    saving = SaveTrainingStateCallback(tmp_path / "states")
    trainer = make_trainer([saving], seed=0)
    with pytest.raises(DamagedStateError):
        train(trainer, resume_from="latest")
    code = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'a'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path / "states" / ".lock")], check=False).returncode == 0


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_loading_runs_no_code(tmp_path):
    run(tmp_path, max_checkpoints=1)
    (state,) = saved_states(tmp_path)
    marker = tmp_path / "executed"

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(marker),)

    (state / "trainer.pt").write_bytes(pickle.dumps(Evil()))
    with changed_manifest(state, "trainer.pt"):
        pass
    verify_state(state)  # whole, but not to be trusted
    with pytest.raises(ValueError, match="cannot be loaded as plain tensors"):
        run(tmp_path)
    assert not marker.exists()


def saving_in_local_folders() -> list[str]:
    """The errors for relative folders if each process has its own working directory."""
    with shared_folder() as folder, contextlib.chdir(folder):
        os.mkdir(str(own_rank()))
        with contextlib.chdir(str(own_rank())):
            trainer = make_trainer([SaveTrainingStateCallback("states", save_every_n_epochs=1)])
            try:
                train(trainer)
            except OSError as error:
                said = [f"{error} {trainer.progress.update} updates, {os.listdir()}"]
            try:
                trainer.save_training_state("state")
            except OSError as error:
                said.append(str(error))
    return said


@pytest.mark.processes
def test_a_folder_not_shared_by_the_processes_is_an_error(two_ranks):
    for rank, said in enumerate(two_ranks(saving_in_local_folders)):
        for message, name in zip(said, ("save_dir='states'", "'.'"), strict=True):
            assert message.startswith("Rank 1 failed: FileNotFoundError: ") == (rank == 0)
            assert f"{name} is not the directory of the first process on " in message
            assert "Pass the absolute path of a directory that all processes share" in message
        assert said[0].endswith(f"0 updates, {['states'] if rank == 0 else []}")


def test_values_that_cannot_be_stored_are_named(tmp_path):
    class Keeps(TrainerCallback):
        def state_dict(self):
            return {"nested": [1, {"path": tmp_path}]}

        def load_state_dict(self, state):
            pass

    with pytest.raises(TypeError, match=r"state\['callbacks'\]\['Keeps'\]\['nested'\]\[1\]\['path'\] is \w*PosixPath"):
        run(tmp_path, extra=(Keeps(),))
    assert not list(tmp_path.glob("states/*update*"))


def test_a_state_with_an_enum_of_a_callback_resumes(tmp_path):
    class Mode(enum.StrEnum):
        MIN = "min"

    class Keeps(TrainerCallback):
        mode = ""

        def state_dict(self):
            return {"mode": Mode.MIN, "seen": {Mode.MIN: 1}}

        def load_state_dict(self, state):
            assert type(state["mode"]) is str
            self.mode, _ = state["mode"], state["seen"]["min"]

    run(tmp_path, extra=(Keeps(),))
    resumed = Keeps()
    run(tmp_path, extra=(resumed,), resume_from="latest")
    assert resumed.mode == "min"


def test_a_state_is_read_while_another_replaces_it(tmp_path, monkeypatch):
    trainer = train(make_trainer())
    trainer.save_training_state(tmp_path / "state")
    train(trainer)
    rename, read = os.rename, []

    def read_after_renaming(*paths: Any) -> None:
        rename(*paths)
        monkeypatch.undo()
        read.append(verify_state(tmp_path / "state")["progress"]["update"])

    monkeypatch.setattr(os, "rename", read_after_renaming)
    trainer.save_training_state(tmp_path / "state")
    assert read == [3]
    assert verify_state(tmp_path / "state")["progress"]["update"] == 3
    assert not [*tmp_path.glob(".*")]


def test_saving_at_the_wrong_moment_is_refused(tmp_path):
    class SavesEarly(TrainerCallback):
        def on_backward_end(self, trainer, **kwargs):
            trainer.save_training_state(tmp_path / "state")

    with pytest.raises(RuntimeError, match="only be saved between updates"):
        adamw_trainer(float64_model(), callbacks=[SavesEarly], seed=1).train(float64_data(8), 1)

    class SavesUnseeded(TrainerCallback):
        def on_train_step_checkpoint(self, trainer, **kwargs):
            trainer.save_training_state(tmp_path / "state")

    with pytest.raises(RuntimeError, match="Give the trainer a seed"):
        adamw_trainer(float64_model(), callbacks=[SavesUnseeded]).train(float64_data(8), 1)


def test_save_model_writes_weights_that_others_load(tmp_path):
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.Linear(5, 5)
            self.second = torch.nn.Linear(5, 5)
            self.second.weight = self.first.weight

        def forward(self, x):
            return self.second(self.first(x))

    model = Tied()
    trainer = adamw_trainer(model)
    trainer.save_model(tmp_path / "new" / "model.safetensors")
    loaded = safetensors.torch.load_file(tmp_path / "new" / "model.safetensors")
    assert equal_weights(loaded, dict(model.state_dict()))
    trainer.save_training_state(tmp_path / "state")  # a training state has tied weights once
    other = Tied()
    adamw_trainer(other).load_training_state(tmp_path / "state")
    assert equal_weights(other.state_dict(), model.state_dict())


class Cupboard:
    """A store of a user's own: ``own://name`` is a folder on this machine. It has no states of runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def at(self, url: str) -> Path:
        path = self.folder / url.removeprefix("own://")
        path.mkdir(parents=True, exist_ok=True)
        return path

    def write_state(self, url: str, ranks: Ranks, captured: Any) -> None:
        entries = ranks.run_together(lambda: write_files(self.at(url), ranks.rank, captured))
        (self.at(url) / "manifest.json").write_text(manifest_text(entries, captured.metadata))

    def read_state(self, url: str, ranks: Ranks) -> Any:
        return read_verified(self.at(url), verify_state(self.at(url)), ranks)

    def fetch_state(self, url: str) -> Any:
        return contextlib.nullcontext(self.at(url))

    collect = fetch_weights = fetch_state


@pytest.mark.extension("printed_states")
def test_states_and_models_may_be_in_a_custom_store(tmp_path, monkeypatch, capsys):
    from pytorch_accel_lite.checkpoint import print_contents

    monkeypatch.setitem(STORES, "own", Cupboard(tmp_path))
    trainer = train(make_trainer())
    trainer.save_training_state("own://state")
    trainer.save_model("own://model")
    expected = trainer.model.state_dict()
    for load in (Trainer.load_training_state, Trainer.load_checkpoint):
        url = "own://state" if load is Trainer.load_training_state else "own://model"
        other = make_trainer()
        load(other, url)
        assert equal_weights(other.model.state_dict(), expected)
    print_contents("own://state")
    assert "training state own://state" in capsys.readouterr().out


class OwnSteps(Trainer):
    """Makes its own updates."""

    def train_step(self, batch):
        self.update((self.model(batch[0]) - batch[1]).square().mean())
        return {}


#: What all ranks share in a state, by the version since which states have these keys.
SHARED_KEYS = {
    "0.1": {
        *("optimizer", "scheduler", "scaler", "model_extra", "history", "microbatches", "items_per_batch"),
        *("loss_func", "objects", "callbacks", "losses", "extra"),
    },
    "0.2": {"attributes", "schedule_shift", "frozen_weights", "logical", "position"},
    "0.3": {
        *("epoch_read", "source_batch_size", "base", "optimizer_classes", "settings", "own_items_per_batch"),
        *("scheduler_classes", "skipped_updates", "set_apart", "counts_to_resume_from", "evaluations", "trainability"),
        *("user_attributes", "gradients"),
    },
}
#: What each rank has of its own.
OWN_KEYS = {
    "0.1": {"losses", "generators"},
    "0.2": {"position"},
    "0.3": {"epoch_read", "source_batch_size", "user_attributes"},
}


@pytest.mark.extension("failed_batches", "logical", "manual_optimization", "streams")
def test_a_state_has_these_keys_and_no_others(tmp_path):
    found: tuple[set[str], set[str]] = set(), set()
    for number, (kind, data, of_trainer, of_train) in enumerate(
        (
            (Trainer, make_data(), {}, {"auto_microbatch": True, "per_device_batch_size": 2}),
            (OwnSteps, make_data(), {}, {"per_device_batch_size": 2}),
            (Trainer, make_data(), {"logical_processes": 2, "seed": 0}, {"per_device_batch_size": 1}),
            (Trainer, OwnShard(list(zip(*(part.split(2) for part in make_data().tensors), strict=True))), {}, {}),
        )
    ):
        saver = SaveTrainingStateCallback(tmp_path / str(number), save_every_n_steps=2, trainable_only=True)
        trainer = make_trainer([saver], trainer_class=kind, **of_trainer)
        trainer.train(data, 1, **of_train)
        state = read_state(tmp_path / str(number) / "update-000000002", trainer.ranks)
        for keys, part in zip(found, (state.shared, state.local), strict=True):
            keys.update(part)
    assert found == (set().union(*SHARED_KEYS.values()), set().union(*OWN_KEYS.values()))


@pytest.mark.parametrize(("first", "second"), [("pt", "other"), ("other", "format")])
def test_tied_weights_may_have_any_names(tmp_path, first, second):
    def make() -> torch.nn.Module:
        module = torch.nn.Linear(5, 1).double()
        module.register_parameter(first, torch.nn.Parameter(torch.rand(3)))
        module.register_parameter(second, getattr(module, first))
        return module

    saved, loaded = make(), make()
    adamw_trainer(saved).save_training_state(tmp_path / "state")
    adamw_trainer(loaded).load_training_state(tmp_path / "state")
    assert equal_weights(loaded.state_dict(), saved.state_dict())
    assert len({path.stat().st_mode for path in (tmp_path / "state").iterdir()}) == 1
