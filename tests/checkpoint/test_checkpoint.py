"""Checkpoints in a single file: portable, and written atomically."""

from __future__ import annotations

import copy
import os
import stat
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.checkpoint import replacing
from pytorch_accel_lite.steps.plain_step import PlainStep
from tests import ancestor
from tests.checkpoint.small_checkpoints import trained
from tests.launching import run_code
from tests.small_models import (
    adamw_trainer,
    equal_weights,
    float64_model,
    listener,
    make_model,
    make_trainer,
    same_bits,
    train,
    weights,
)


def test_a_checkpoint_restores_model_optimizer_and_scheduler(tmp_path):
    saved = trained()
    saved.save_checkpoint(tmp_path / "model.pt", checkpoint_kwargs={"epoch": 2, "note": "good", "scores": [0.5, 0.75]})
    loaded = trained(seed=1)
    assert not equal_weights(weights(saved.model), weights(loaded.model))
    checkpoint = loaded.load_checkpoint(tmp_path / "model.pt")
    assert equal_weights(weights(saved.model), weights(loaded.model))
    assert same_bits(saved.optimizer.state_dict(), loaded.optimizer.state_dict())
    assert same_bits(saved.scheduler.state_dict(), loaded.scheduler.state_dict())
    assert (checkpoint["epoch"], checkpoint["note"], checkpoint["scores"]) == (2, "good", [0.5, 0.75])
    assert set(checkpoint) == {
        "model_state_dict", "optimizer_state_dict", "scheduler_state_dict", "epoch", "note", "scores"
    }  # fmt: skip


def test_training_continues_from_a_checkpoint_in_the_same_bits(tmp_path):
    saved = trained()
    saved.save_checkpoint(tmp_path / "model.pt")
    loaded = trained(seed=1)
    loaded.load_checkpoint(tmp_path / "model.pt")
    for trainer in (saved, loaded):
        train(trainer, epochs=2)
    assert equal_weights(weights(saved.model), weights(loaded.model))


def test_a_checkpoint_loads_after_the_scheduler_was_created(tmp_path):
    saved = trained()
    saved.save_checkpoint(tmp_path / "model.pt")
    model = make_model(1)
    seen: list[Any] = []

    def load(trainer: Trainer) -> None:
        trainer.load_checkpoint(tmp_path / "model.pt")
        seen.append((copy.deepcopy(trainer.scheduler.state_dict()), weights(trainer.model)))

    trainer = make_trainer(
        [listener(on_training_run_start=load)], model=model, optimizer=torch.optim.Adam(model.parameters())
    )
    train(trainer, create_scheduler_fn=lambda optimizer: StepLR(optimizer, 1, gamma=0.9))
    assert same_bits(seen[0][0], saved.scheduler.state_dict())
    assert equal_weights(seen[0][1], weights(saved.model))


def test_a_schedule_without_a_place_for_it_is_reported(tmp_path, capsys):
    trained().save_checkpoint(path := tmp_path / "model.pt")
    trainer = make_trainer(model=(model := make_model(1)), optimizer=torch.optim.Adam(model.parameters(), lr=0.01))
    trainer.load_checkpoint(path)
    assert f"The schedule in '{path}' was not loaded: train() creates its own" in capsys.readouterr().out
    trainer.load_checkpoint(path, load_scheduler=False)
    assert capsys.readouterr().out == ""


def test_a_file_is_plain_torch_and_loads_without_this_package(tmp_path):
    trainer = trained()
    trainer.save_checkpoint(tmp_path / "model.pt")
    checkpoint = torch.load(tmp_path / "model.pt", weights_only=True)
    model = make_model(1)
    model.load_state_dict(checkpoint["model_state_dict"])
    assert equal_weights(weights(model), weights(trainer.model))


@pytest.mark.parametrize("optimizer", [True, False])
@pytest.mark.parametrize("scheduler", [True, False])
def test_loading_keeps_states_missing_in_the_checkpoint(tmp_path, optimizer, scheduler):
    saved, loaded = trained(), trained(seed=1)
    saved.save_checkpoint(tmp_path / "model.pt", save_optimizer=optimizer, save_scheduler=scheduler)
    before = copy.deepcopy((loaded.optimizer.state_dict(), loaded.scheduler.state_dict()))
    checkpoint = loaded.load_checkpoint(tmp_path / "model.pt")
    assert ("optimizer_state_dict" in checkpoint, "scheduler_state_dict" in checkpoint) == (optimizer, scheduler)
    assert equal_weights(weights(saved.model), weights(loaded.model))
    assert same_bits(loaded.optimizer.state_dict(), before[0]) != optimizer
    assert optimizer or same_bits(loaded.scheduler.state_dict(), before[1])


def test_states_excluded_from_loading_are_unchanged(tmp_path):
    trained().save_checkpoint(tmp_path / "model.pt")
    loaded = trained(seed=1)
    before = copy.deepcopy(loaded.optimizer.state_dict())
    checkpoint = loaded.load_checkpoint(tmp_path / "model.pt", load_optimizer=False, load_scheduler=False)
    assert same_bits(loaded.optimizer.state_dict(), before)
    assert "optimizer_state_dict" in checkpoint


def test_a_trainer_without_optimizer_saves_and_loads_weights(tmp_path):
    first, second = (make_trainer(model=make_model(seed), optimizer=None) for seed in (0, 1))
    first.save_checkpoint(tmp_path / "model.pt")
    assert set(second.load_checkpoint(tmp_path / "model.pt")) == {"model_state_dict"}
    assert equal_weights(weights(first.model), weights(second.model))


@pytest.mark.parametrize("per_node", [True, False])
def test_missing_folders_are_created(tmp_path, per_node):
    path = f"{tmp_path}/some/where/model.pt"
    trained().save_checkpoint(path, save_per_node=per_node)
    assert trained(seed=1).load_checkpoint(path)
    assert os.listdir(Path(path).parent) == ["model.pt"]


def test_saved_files_have_default_permissions(tmp_path):
    (tmp_path / "other").touch()
    trained().save_checkpoint(tmp_path / "model.pt")
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("other", "model.pt")}
    assert len(modes) == 1


@pytest.mark.parametrize("save", ["save_checkpoint", "save_model"])
def test_a_file_that_is_saved_again_keeps_its_permissions(tmp_path, save):
    path = tmp_path / "model.safetensors"
    getattr(trained(), save)(path)
    for mode in (0o600, 0o640, 0o444):
        path.chmod(mode)
        before = path.stat().st_ino
        getattr(trained(), save)(path)
        assert stat.S_IMODE(path.stat().st_mode) == mode
        assert path.stat().st_ino != before


def test_nobody_else_can_read_a_private_file_while_it_is_written(tmp_path):
    path, modes = tmp_path / "model.pt", []
    path.touch(mode=0o600)
    with replacing(path) as temporary:
        modes.append(stat.S_IMODE(temporary.stat().st_mode))
    assert modes == [0o600]


def test_a_link_is_replaced_and_its_target_left_alone(tmp_path):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "precious").chmod(0o600)
    (tmp_path / "model.pt").symlink_to(tmp_path / "precious")
    trained().save_checkpoint(tmp_path / "model.pt")
    assert not (tmp_path / "model.pt").is_symlink()
    assert (tmp_path / "precious").read_text() == "mine"
    (tmp_path / "other").touch()
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("other", "model.pt")}
    assert len(modes) == 1


def test_a_saved_file_and_its_folder_are_on_the_disk(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(os.readlink(f"/proc/self/fd/{number}")))
    trained().save_checkpoint(tmp_path / "model.pt")
    assert [Path(path).name.rsplit(".", 2)[0] for path in synced] == [".model.pt", tmp_path.name]


def test_saving_in_the_middle_of_a_run_changes_no_bit_of_it(tmp_path):
    save = listener(on_train_step_end=lambda trainer, **_: trainer.save_checkpoint(tmp_path / "model.pt"))
    saving, plain = train(make_trainer([save])), train(make_trainer())
    assert equal_weights(weights(saving.model), weights(plain.model))
    assert equal_weights(torch.load(tmp_path / "model.pt")["model_state_dict"], weights(plain.model))


# ------------------------------------------------------------------------------------- the ancestor's

ANCESTOR = """
import sys
import torch
from torch import nn
from pytorch_accelerated import Trainer
from torch.optim.lr_scheduler import StepLR

from tests.small_models import make_data, make_model

folder = sys.argv[1]


def trained(seed):
    model = make_model(seed)
    trainer = Trainer(model, nn.MSELoss(), torch.optim.Adam(model.parameters(), lr=0.01), callbacks=[])
    alone = {"num_workers": 0, "shuffle": False}
    trainer.train(
        make_data(), 2, per_device_batch_size=2, train_dataloader_kwargs=alone,
        create_scheduler_fn=lambda optimizer: StepLR(optimizer, 1, gamma=0.9),
    )
    return trainer


first = trained(2)
first.save_checkpoint(f"{folder}/ancestor.pt", checkpoint_kwargs={"epoch": 2})

second = trained(3)
checkpoint = second.load_checkpoint(f"{folder}/ours.pt")
assert checkpoint["note"] == "ours"
second.save_checkpoint(f"{folder}/ours_saved_by_the_ancestor.pt")
"""


@pytest.fixture(scope="module")
def exchanged_files(tmp_path_factory):
    """A folder with a file saved by the ancestor, and one of ours that it loaded and saved again."""
    ancestor.skip_without_it()
    folder = tmp_path_factory.mktemp("exchange")
    trained().save_checkpoint(folder / "ours.pt", checkpoint_kwargs={"note": "ours"})
    run_code(ANCESTOR, str(folder))
    return folder


def test_a_file_of_the_ancestor_is_loaded_with_its_optimizer(exchanged_files):
    theirs = torch.load(exchanged_files / "ancestor.pt", weights_only=True)
    trainer = trained(seed=1)
    assert trainer.load_checkpoint(exchanged_files / "ancestor.pt")["epoch"] == 2
    assert equal_weights(weights(trainer.model), theirs["model_state_dict"])
    assert same_bits(trainer.optimizer.state_dict(), theirs["optimizer_state_dict"])
    assert trainer.scheduler.state_dict()["_step_count"] == theirs["scheduler_state_dict"]["_step_count"]
    train(trainer)


def test_the_ancestor_loads_our_file_with_its_optimizer(exchanged_files):
    ours = torch.load(exchanged_files / "ours.pt", weights_only=True)
    back = torch.load(exchanged_files / "ours_saved_by_the_ancestor.pt", weights_only=True)
    assert equal_weights(ours["model_state_dict"], back["model_state_dict"])
    assert same_bits(ours["optimizer_state_dict"], back["optimizer_state_dict"])
    assert back["scheduler_state_dict"]["_step_count"] == ours["scheduler_state_dict"]["_step_count"]


def test_entries_of_a_checkpoint_are_a_dict(tmp_path):
    with pytest.raises(TypeError, match=r"^checkpoint_kwargs=Namespace.*Pass vars\(checkpoint_kwargs\)"):
        make_trainer().save_checkpoint(tmp_path / "model.pt", Namespace(lr=1))


ENTRIES = ["model_state_dict", "optimizer_state_dict", "scheduler_state_dict", "loss_func_state_dict"]


@pytest.mark.parametrize("name", [*ENTRIES, "attribute_state_dicts", "frozen_weights"])
def test_entries_of_a_checkpoint_are_not_overwritten(tmp_path, name):
    with pytest.raises(ValueError, match=f"a checkpoint has its own '{name}'. Give your entry another name"):
        make_trainer().save_checkpoint(tmp_path / "model.pt", {name: 1, "mine": 2})
    assert not (tmp_path / "model.pt").exists()


def test_entries_of_a_training_state_are_not_hidden(tmp_path):
    trainer = train(make_trainer())
    trainer.save_training_state(tmp_path / "state", {"mine": 1})
    entries = trainer.load_training_state(tmp_path / "state")
    assert entries.pop("mine") == 1
    for name in entries:
        with pytest.raises(ValueError, match=f"a training state has its own '{name}'"):
            trainer.save_training_state(tmp_path / "other", {name: 1})
    with pytest.raises(ValueError, match="has its own 'seed', 'world_size'"):
        trainer.save_training_state(tmp_path / "other", {"world_size": 1, "seed": 1})


@pytest.mark.parametrize("name", ["extra", "history", "optimizer"])
def test_an_entry_of_a_step_replaces_none_of_the_trainer(tmp_path, name):
    class Own(PlainStep):
        def state_dict(self):
            return {**super().state_dict(), name: 1}

    trainer = train(make_trainer())
    trainer.current_run.training_step = Own(trainer, trainer.current_run)
    with pytest.raises(ValueError, match=f"The state of Own has '{name}', which training states have already"):
        trainer.save_training_state(tmp_path / "state")


def test_a_checkpoint_may_be_loaded_in_part(tmp_path):
    adamw_trainer(float64_model(1)).save_checkpoint(tmp_path / "model.pt")
    model = float64_model(2)
    model[2] = torch.nn.Linear(8, 3).double()
    kept = model[2].weight.clone()
    with pytest.warns(UserWarning, match=r"of a different shape: 2\.bias .*, 2\.weight .* The rest is loaded"):
        adamw_trainer(model).load_checkpoint(tmp_path / "model.pt", load_optimizer=False, strict=False)
    assert torch.equal(model[0].weight, float64_model(1)[0].weight)
    assert torch.equal(model[2].weight, kept)
