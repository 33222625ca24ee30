"""The files of training states: damage, rotation, full disks, stores and what may not be stored."""

from __future__ import annotations

import contextlib
import enum
import io
import os
import pickle
import resource
import shutil
import subprocess
import sys
import threading
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import safetensors.torch
import torch

from pytorch_accel_lite import Trainer, TrainerCallback
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from pytorch_accel_lite.checkpoint import DamagedStateError, print_contents, verify_state
from pytorch_accel_lite.checkpoint.states import state_contents
from pytorch_accel_lite.data import OwnShard
from pytorch_accel_lite.extending import STORES, Ranks, manifest_text, read_state, read_verified, write_files
from tests.launching import some_of
from tests.ranks import rank as own_rank
from tests.ranks import shared_folder, world_size
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
    notes_of_error,
    raises_at,
    train,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*")


def test_a_finished_run_removes_its_old_states_when_resumed(tmp_path):
    run(tmp_path)
    *_, newest = saved_states(tmp_path)
    run(tmp_path, max_checkpoints=1)
    assert saved_states(tmp_path) == [newest]


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


def test_rotation_keeps_the_newest_and_foreign_files(tmp_path):
    (tmp_path / "states" / "notes").mkdir(parents=True)
    (tmp_path / "states" / "update-final").mkdir()
    last = run(tmp_path, max_checkpoints=2, save_every_n_epochs=1)["progress"]["update"]
    kept = [path for path in saved_states(tmp_path) if path.name != "update-final"]
    assert {int(path.name.removeprefix("update-")) for path in kept} == {last - 1, last}
    assert (tmp_path / "states" / "notes").is_dir()
    assert not list((tmp_path / "states").glob(".update*"))


@pytest.mark.parametrize("keep", [1, None])
def test_the_newest_state_does_not_depend_on_the_clock(keep, tmp_path, capsys):
    def run(epochs: int) -> Trainer:
        saver = SaveTrainingStateCallback(tmp_path, save_every_n_epochs=1, max_checkpoints=keep)
        return train(make_trainer([saver], seed=0), epochs, resume_from="latest")

    run(2)
    for state in tmp_path.glob("update-*"):
        with changed_manifest(state) as manifest:
            manifest["saved_at"] += 300.0  # as on a machine whose clock is ahead of this one's
    run(4)
    saved = sorted(path.name for path in tmp_path.glob("update-*"))
    assert saved == [f"update-{update:09d}" for update in ([12] if keep else [3, 6, 9, 12])]
    run(5)
    assert "update-000000012': epoch 4" in capsys.readouterr().out


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


def test_a_save_dir_that_is_a_file_is_an_error_before_training(tmp_path):
    (tmp_path / "states").touch()
    trainer = make_trainer([SaveTrainingStateCallback(tmp_path / "states")])
    with pytest.raises(NotADirectoryError, match=r"save_dir='.*/states' is not a directory.* another save_dir"):
        train(trainer)
    assert trainer.progress.update == 0


def test_a_state_whose_manifest_is_a_directory_is_damaged(tmp_path, capsys):
    whole = run(tmp_path)
    *_, before, newest = saved_states(tmp_path)
    (newest / "manifest.json").unlink()
    (newest / "manifest.json").mkdir()
    assert_same(run(tmp_path), whole)
    output = capsys.readouterr().out
    assert f"Skipping a damaged training state. '{newest}/manifest.json' is damaged: " in output
    assert f"Resuming from '{before}'" in output


def test_rotation_removes_links_to_states_but_not_their_targets(tmp_path):
    run(tmp_path, epochs=1, schedule=False)
    (tmp_path / "elsewhere").mkdir()
    for state in saved_states(tmp_path):
        state.rename(tmp_path / "elsewhere" / state.name)
        state.symlink_to(tmp_path / "elsewhere" / state.name)
    (tmp_path / "states" / ".update-000000001.removed").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "states" / "update-000000005").symlink_to(tmp_path / "nothing")  # an update to come
    (tmp_path / "states" / "update-000000006").touch()
    whole = run(tmp_path / "whole", epochs=2, schedule=False)
    assert_same(run(tmp_path, epochs=2, max_checkpoints=1, schedule=False), whole)
    assert sorted(os.listdir(tmp_path / "states")) == [".lock", "update-000000008"]
    assert len(os.listdir(tmp_path / "elsewhere")) == 4


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


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"save_every_n_epochs": 0}, "save_every_n_epochs=0 must be at least 1"),
        ({"save_every_n_steps": -1}, "save_every_n_steps=-1 must be at least 1"),
        ({"max_checkpoints": 0}, "max_checkpoints=0 must be at least 1"),
        ({"save_every_n_minutes": 0}, "save_every_n_minutes=0 must be greater than 0"),
    ],
)
def test_saving_states_refuses_bad_intervals(kwargs, message):
    with pytest.raises(ValueError, match=message):
        SaveTrainingStateCallback(**kwargs)


def test_states_can_be_saved_by_the_clock(tmp_path):
    saved = run(tmp_path, save_every_n_steps=None, save_every_n_minutes=1e-9, save_at_end=False)
    assert len(saved_states(tmp_path)) == saved["progress"]["update"]


class FillsDisk(TrainerCallback):
    """Limits the size of files between two updates, to simulate a full disk."""

    def __init__(self, first: int, last: int = 10**9, size: int = 1000) -> None:
        self.first, self.last, self.size = first, last, size
        self.before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def on_train_step_end(self, trainer, **kwargs):
        for thread in threading.enumerate():
            if thread.name == "training-state-writer":  # what it writes belongs to the update before
                thread.join()
        if trainer.progress.update == self.first:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, self.before[1]))
        if trainer.progress.update == self.last:
            self.free()

    def free(self):
        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_keeps_and_names_the_last_state(tmp_path, asynchronous, capsys):
    fills = FillsDisk(9)  # where the next thing to be written is a state
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            run(tmp_path, extra=(fills,), save_every_n_steps=3, asynchronous=asynchronous)
    finally:
        fills.free()
    assert [path.name for path in saved_states(tmp_path)] == ["update-000000003", "update-000000006"]
    assert not list((tmp_path / "states").glob(".*tmp"))
    saved = f"The run is saved in '{tmp_path}/states/update-000000006', after update 6."
    assert saved in notes_of_error(caught.value, capsys.readouterr().out)
    fills.first = 7  # the resumed run can save nothing of its own
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            run(tmp_path, extra=(fills,), save_every_n_steps=3, asynchronous=asynchronous)
    finally:
        fills.free()
    assert saved in notes_of_error(caught.value, capsys.readouterr().out)
    whole = run(tmp_path / "whole", save_every_n_steps=3)
    assert_same(run(tmp_path, save_every_n_steps=3), whole)


def fail_while_a_state_is_written(folder: Path) -> str:
    """The notes when both processes fail while a state is being written."""
    assert world_size() == 2
    may_end, sync, output = threading.Event(), os.fsync, io.StringIO()

    def waiting_sync(descriptor: int) -> None:
        if "update-000000004" in os.readlink(f"/proc/self/fd/{descriptor}"):
            assert may_end.wait(120)
        sync(descriptor)

    saving = SaveTrainingStateCallback(folder, save_every_n_steps=2, asynchronous=True)
    trainer = make_trainer([saving, raises_at(5, RuntimeError("broken"), "on_train_step_start")])
    with patch.object(os, "fsync", waiting_sync), contextlib.redirect_stdout(output):
        try:
            with pytest.raises(RuntimeError, match="broken") as caught:
                train(trainer, size=40)
        finally:
            may_end.set()
            for thread in threading.enumerate():
                if thread.name == "training-state-writer":
                    thread.join(120)
    assert trainer.progress.update == 5
    return notes_of_error(caught.value, output.getvalue())


@pytest.mark.processes
def test_an_unfinished_state_of_a_failed_run_is_not_called_saved(tmp_path, two_ranks):
    said, _ = two_ranks.run(fail_while_a_state_is_written, tmp_path)
    assert f"The run is saved in '{tmp_path}/update-000000002', after update 2." in said


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_run_may_continue_when_the_disk_is_full(tmp_path, capsys, asynchronous):
    fills = FillsDisk(5, 7)
    try:
        result = run(tmp_path, extra=(fills,), save_every_n_steps=3, asynchronous=asynchronous, continue_on_error=True)
    finally:
        fills.free()
    assert "could not be saved; the run continues. OSError: [Errno 27]" in capsys.readouterr().out
    names = [path.name for path in saved_states(tmp_path)]
    assert names[0] == "update-000000003"
    assert "update-000000006" not in names
    assert names[-1] == "update-000000012"
    assert_same(result, run(tmp_path / "whole", resume_from=None))


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("size", [0, 9000])
def test_a_run_may_continue_wherever_a_state_fills_the_disk(tmp_path, capsys, size, asynchronous):
    fills = FillsDisk(6, 8, size)
    try:
        run(tmp_path, extra=(fills,), asynchronous=asynchronous, continue_on_error=True)
    finally:
        fills.free()
    report = "the run continues. OSError: [Errno 27] File too large:"
    assert f"{report} '{tmp_path}/states/update-000000006/rank00000.pt'" in " ".join(capsys.readouterr().out.split())
    assert [int(path.name[-2:]) for path in saved_states(tmp_path)] == [1, 2, 3, 4, 5, 8, 9, 10, 11, 12]


def test_training_continues_while_a_state_is_written(tmp_path, monkeypatch):
    """The first sync waits for a later update, so the test would hang if training waited for the sync."""
    later, sync = threading.Event(), os.fsync

    def waiting_sync(descriptor: int) -> None:
        if threading.current_thread() is not threading.main_thread():  # which syncs the best model
            assert later.wait(60)
        sync(descriptor)

    class Later(TrainerCallback):
        def on_train_step_start(self, trainer, **kwargs):
            if trainer.progress.update == 5:
                assert not list((tmp_path / "states").glob("update-*"))
                later.set()

    monkeypatch.setattr(os, "fsync", waiting_sync)
    result = run(tmp_path, extra=(Later(),), save_every_n_steps=3, asynchronous=True)
    assert later.is_set()
    assert [path.name[-2:] for path in saved_states(tmp_path)] == ["03", "06", "09", "12"]
    assert_same(result, run(tmp_path / "whole", resume_from=None))
    shutil.rmtree(saved_states(tmp_path)[-1])
    assert_same(run(tmp_path), result)


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


def test_states_and_models_may_be_in_a_custom_store(tmp_path, monkeypatch, capsys):
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


def test_without_any_store_the_error_names_the_extension(monkeypatch):
    for name in [*STORES]:
        monkeypatch.delitem(STORES, name)
    with pytest.raises(ValueError, match="belongs to the extension 'remote', which is not installed"):
        SaveTrainingStateCallback("s3://bucket/run")


class OwnSteps(Trainer):
    """Makes its own updates."""

    def train_step(self, batch):
        self.update((self.model(batch[0]) - batch[1]).square().mean())
        return {}


@pytest.mark.extension("failed_batches", "logical", "manual_optimization", "streams")
def test_the_tables_of_the_keys_of_a_state_are_complete(tmp_path):
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
    assert found == ({*state_contents.SHARED_KEYS}, {*state_contents.OWN_KEYS})
