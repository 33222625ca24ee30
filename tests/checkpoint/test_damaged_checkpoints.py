"""Damaged checkpoints are not loaded; files of others, without a checksum, are."""

from __future__ import annotations

import io
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.callbacks import SaveBestModelCallback
from pytorch_accel_lite.checkpoint import read_checkpoint
from tests.checkpoint.small_checkpoints import flip, save_file, trained
from tests.small_models import equal_weights, listener, make_model, make_trainer, train, weights


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
def test_no_flipped_byte_of_a_checkpoint_is_used(tmp_path, name):
    path, model = tmp_path / name, nn.Linear(2, 2)
    trainer = make_trainer(model=model)
    save = (
        trainer.save_model if name.endswith("safetensors") else partial(trainer.save_checkpoint, save_optimizer=False)
    )
    save(path)
    saved = weights(model)
    loaded = []
    positions = range(0, path.stat().st_size, 3)
    for position in positions:
        content = flip(path, position)
        with suppress(ValueError):
            loaded.append(read_checkpoint(path)["model_state_dict"])
        path.write_bytes(content)
    assert all(equal_weights(other, saved) for other in loaded)  # flipped in what fills the space between records
    assert len(loaded) < len(positions) - 50


@pytest.mark.parametrize("method", ["save_checkpoint", "save_model"])
def test_no_flipped_byte_of_an_open_file_is_used(method):
    trainer, file = make_trainer(model=nn.Linear(2, 2)), io.BytesIO()
    getattr(trainer, method)(file)
    saved, loaded, content = weights(trainer.model), [], file.getvalue()
    positions = range(0, len(content), 7)
    for position in positions:
        damaged = content[:position] + bytes([content[position] ^ 0x40]) + content[position + 1 :]
        with suppress(ValueError):
            loaded.append(read_checkpoint(io.BytesIO(damaged))["model_state_dict"])
    assert all(equal_weights(other, saved) for other in loaded)
    assert len(loaded) < len(positions) - 20


def test_a_damaged_open_file_is_named_and_not_loaded(tmp_path):
    other = make_trainer(model=make_model(1))
    before, file = weights(other.model), io.BytesIO()
    make_trainer(model=make_model(0)).save_checkpoint(file)
    content = bytearray(file.getvalue())
    content[content.index(make_model(0).state_dict()["0.weight"].numpy().tobytes())] ^= 0x40
    (tmp_path / "model.pt").write_bytes(content)
    with pytest.raises(ValueError, match=r"The file '<BytesIO>' is damaged: its content does not match its checksum"):
        other.load_checkpoint(io.BytesIO(content))
    with open(tmp_path / "model.pt", "rb") as opened, pytest.raises(ValueError, match=r"model\.pt' is damaged"):
        read_checkpoint(opened)
    for cut in (0, 100, len(content) // 2):
        with pytest.raises(ValueError, match="'<BytesIO>' cannot be loaded as plain tensors"):
            read_checkpoint(io.BytesIO(content[:cut]))
    assert equal_weights(weights(other.model), before)


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors", "model"])
def test_damaged_weights_are_not_loaded(tmp_path, name):
    path = tmp_path / name
    trainer = trained()
    (trainer.save_checkpoint if name.endswith(".pt") else trainer.save_model)(path)
    file = path / "model.safetensors" if path.is_dir() else path
    weight = next(iter(trainer.model.parameters())).detach().numpy().tobytes()
    flip(file, file.read_bytes().index(weight))
    other = trained(seed=1)
    before = weights(other.model)
    with pytest.raises(ValueError, match=rf"{file.name}' is damaged: its content does not match its checksum"):
        other.load_checkpoint(path)
    assert equal_weights(weights(other.model), before)


def test_a_damaged_best_model_is_not_loaded_at_the_end(tmp_path):
    path = tmp_path / "best.pt"

    def damage(trainer: Trainer, **kwargs: Any) -> None:
        weight = torch.load(path)["model_state_dict"]["0.weight"].numpy().tobytes()
        flip(path, path.read_bytes().index(weight))

    callbacks = [listener(on_training_run_end=damage), SaveBestModelCallback(path, "train_loss_epoch")]
    with pytest.raises(ValueError, match=r"best.pt' is damaged"):
        train(make_trainer(callbacks=callbacks), epochs=1)


def test_files_of_others_have_no_checksum_and_are_loaded(tmp_path):
    model = make_model(0)
    torch.save(model.state_dict(), tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    safetensors.torch.save_file(model.state_dict(), tmp_path / "plain.safetensors")
    torch.serialization.set_crc32_options(False)
    try:
        save_file(tmp_path / "unchecked.pt", model)
    finally:
        torch.serialization.set_crc32_options(True)
    for file in tmp_path.iterdir():
        other = make_trainer(model=make_model(1))
        other.load_checkpoint(file)
        assert equal_weights(weights(other.model), weights(model))


def test_other_libraries_read_files_with_a_checksum(tmp_path):
    trainer = trained()
    trainer.save_model(tmp_path / "model.safetensors")
    trainer.save_checkpoint(tmp_path / "model.pt")
    plain = torch.load(tmp_path / "model.pt", weights_only=True)["model_state_dict"]
    assert equal_weights(safetensors.torch.load_file(tmp_path / "model.safetensors"), plain)


def load_damaged(path: Path) -> str:
    trainer = make_trainer(model=make_model(1))
    try:
        trainer.load_checkpoint(path, load_optimizer=False)
    except ValueError as error:
        return str(error)
    return "loaded"


@pytest.mark.processes
def test_damaged_weights_are_refused_on_all_processes(tmp_path, two_ranks):
    make_trainer(model=make_model(0)).save_checkpoint(tmp_path / "model.pt")
    weight = make_model(0).state_dict()["0.weight"].numpy().tobytes()
    path = tmp_path / "model.pt"
    flip(path, path.read_bytes().index(weight))
    first, second = two_ranks.run(load_damaged, path)
    assert first == second
    assert "model.pt' is damaged: its content does not match its checksum" in first
