"""Saving a model to a directory: weights, additional files, and refused paths."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import safetensors.torch
import torch

from pytorch_accel_lite.callbacks import SaveBestModelCallback
from pytorch_accel_lite.extending import COMPANION_WRITERS, MODEL_FORMS, ModelForm, SavedModel
from tests.launching import CAN_SHARD
from tests.saved_models import saved_sharded, trained
from tests.sharded import create_model
from tests.small_models import adamw_trainer, equal_weights, float64_model, make_trainer


def test_frozen_weights_may_be_left_out_of_a_directory(tmp_path):
    model = float64_model()
    model[0].requires_grad_(False)
    adamw_trainer(model).save_model(tmp_path, trainable_only=True)
    assert safetensors.torch.load_file(tmp_path / "model.safetensors").keys() == {"2.weight", "2.bias"}
    other = float64_model()
    adamw_trainer(other).load_checkpoint(tmp_path)
    assert equal_weights(other.state_dict(), model.state_dict())


def test_frozen_sparse_weights_are_not_left_out(tmp_path):
    class Sparse(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.graph = torch.nn.Parameter(torch.eye(3).to_sparse(), requires_grad=False)
            self.frozen = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
            self.layer = torch.nn.Linear(3, 1)

    adamw_trainer(Sparse()).save_checkpoint(tmp_path / "a.pt", trainable_only=True)
    saved = torch.load(tmp_path / "a.pt", weights_only=False)["model_state_dict"]
    assert {*saved} == {"graph", "layer.weight", "layer.bias"}
    adamw_trainer(Sparse()).load_checkpoint(tmp_path / "a.pt")


def test_invalid_paths_of_models_are_refused(tmp_path):
    trainer = adamw_trainer(float64_model())
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"path='.*/file' is a file, but should be a directory .* or move the file"):
        trainer.save_model(tmp_path / "file")
    with pytest.raises(ValueError, match=r"path='hf://me/waves/model.pt' is a URL, but .* save_model\(\) and"):
        trainer.save_checkpoint("hf://me/waves/model.pt")
    with pytest.raises(ValueError, match=r"save_path='hf://me/waves/best.pt' is a URL, but a checkpoint is on a disk"):
        SaveBestModelCallback("hf://me/waves/best.pt")
    assert {path.name for path in tmp_path.iterdir()} == {"file"}


@pytest.mark.processes
@CAN_SHARD
def test_all_processes_save_a_sharded_model_as_one(tmp_path, two_ranks):
    for whole in two_ranks.run(saved_sharded, tmp_path):
        assert equal_weights(whole, dict(create_model().state_dict()))
        assert equal_weights(safetensors.torch.load_file(tmp_path / "sharded" / "model.safetensors"), whole)


# ------------------------------------------------------------------------- what is written beside the weights


class Licence:
    """Writes a licence beside the weights, whose name is in the metadata."""

    def __init__(self) -> None:
        self.written: list[SavedModel] = []

    def check(self, card_data: Any) -> None:
        if card_data.get("license") not in (None, "mit"):
            raise ValueError(f"there is no text of {card_data['license']!r}")

    def write(self, trainer: Any, saved: SavedModel) -> None:
        assert (saved.folder / "model.safetensors").exists()
        (saved.folder / "LICENSE").write_text(f"{saved.card_data.get('license')}, update {trainer.progress.update}")
        self.written.append(saved)


def test_registered_writers_add_files_to_a_saved_model(tmp_path, monkeypatch):
    licence = Licence()
    monkeypatch.setitem(COMPANION_WRITERS, "licence", licence)
    trainer = trained(epochs=1)
    trainer.save_model(tmp_path / "model", card_data={"license": "mit"})
    trainer.save_model(tmp_path / "alone.safetensors")
    assert (tmp_path / "model" / "LICENSE").read_text() == "mit, update 3"
    [saved] = licence.written
    assert (saved.location, saved.trainable_only) == (tmp_path / "model", False)
    with pytest.raises(ValueError, match="there is no text of 'own'"):
        trainer.save_model(tmp_path / "other", card_data={"license": "own"})
    assert not (tmp_path / "other").exists()


def test_without_any_writer_the_error_names_the_extension(tmp_path, monkeypatch):
    for name in [*COMPANION_WRITERS]:
        monkeypatch.delitem(COMPANION_WRITERS, name)
    trainer = adamw_trainer(float64_model())
    with pytest.raises(
        ValueError, match=r"card_data=\{'license': 'mit'\} belongs to the extension 'reports', which is not"
    ):
        trainer.save_model(tmp_path, card_data={"license": "mit"})
    trainer.save_model(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


# ----------------------------------------------------------------------------------------- forms of libraries


class Pickled(ModelForm):
    """A model form that saves the weights of ``nn.Sequential`` with ``torch.save``."""

    def writer_of(self, trainer: Any, model: Any) -> Any:
        if not isinstance(model, torch.nn.Sequential):
            return None
        return lambda weights, folder: torch.save(dict(weights), folder / "weights.pt")

    def read(self, directory: Path, model: Any) -> Any:
        file = directory / "weights.pt"
        return {"model_state_dict": torch.load(file)} if file.exists() else None

    def clear(self, directory: Path, model: Any) -> None:
        (directory / "weights.pt").unlink(missing_ok=True)


def test_models_are_saved_and_loaded_in_a_form_of_users(tmp_path, monkeypatch):
    monkeypatch.setitem(MODEL_FORMS, "pickled", Pickled())
    trainer, other = adamw_trainer(float64_model()), adamw_trainer(float64_model())
    torch.nn.init.ones_(trainer.model[0].weight)
    trainer.save_model(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} - {"README.md", "curves.png"} == {"weights.pt"}
    other.load_checkpoint(tmp_path)
    assert equal_weights(other.model.state_dict(), trainer.model.state_dict())
    trainer.save_model(tmp_path, trainable_only=True)
    assert not (tmp_path / "weights.pt").exists()
    assert (tmp_path / "model.safetensors").exists()
    linear = torch.nn.Linear(2, 1)
    adamw_trainer(linear).save_model(tmp_path / "other")  # not of this form
    assert (tmp_path / "other" / "model.safetensors").exists()


def test_without_its_form_a_models_weights_are_saved(tmp_path, monkeypatch):
    for name in [*MODEL_FORMS]:
        monkeypatch.delitem(MODEL_FORMS, name)
    model = float64_model()
    model.__class__ = type("Net", (torch.nn.Sequential,), {"__module__": "transformers.models.net"})
    with pytest.warns(UserWarning, match=r"as transformers does belongs to the extension 'pretrained', which"):
        adamw_trainer(model).save_model(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} - {"README.md", "curves.png"} == {"model.safetensors"}


def test_without_their_form_adapters_are_an_error_that_names_it(tmp_path, monkeypatch):
    for name in [*MODEL_FORMS]:
        monkeypatch.delitem(MODEL_FORMS, name)
    peft = ModuleType("peft")
    vars(peft)["PeftModel"] = torch.nn.Sequential
    monkeypatch.setitem(sys.modules, "peft", peft)
    (tmp_path / "adapter_model.safetensors").touch()
    with pytest.raises(ValueError, match=r"adapter_model.safetensors' belongs to the extension 'pretrained', which is"):
        adamw_trainer(float64_model()).load_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["model.pt", "model.onnx"])
def test_a_folder_named_like_a_file_is_warned_of(tmp_path, name):
    with pytest.warns(UserWarning, match=rf"{name}': save_model\(\) creates a folder.* or call save_checkpoint\(\)"):
        make_trainer().save_model(tmp_path / name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_trainer().save_model(tmp_path / name)
        make_trainer().save_model(tmp_path / "version-1.2")
