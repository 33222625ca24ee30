"""Saving a model in a directory: its weights, what is written beside them, and what cannot be saved."""

from __future__ import annotations

from typing import Any

import pytest
import safetensors.torch
import torch

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.callbacks import SaveBestModelCallback
from pytorch_accel_lite.extending import MODEL_WRITERS, SavedModel
from tests.launching import CAN_SHARD
from tests.saved_models import saved_sharded, trained
from tests.sharded import create_model
from tests.tasks import equal, quiet_trainer, small_model


def test_frozen_weights_may_be_left_out_of_a_directory(tmp_path):
    model = small_model()
    model[0].requires_grad_(False)
    quiet_trainer(model).save_model(tmp_path, trainable_only=True)
    assert safetensors.torch.load_file(tmp_path / "model.safetensors").keys() == {"2.weight", "2.bias"}
    other = small_model()
    quiet_trainer(other).load_checkpoint(tmp_path)
    assert equal(other.state_dict(), model.state_dict())


@pytest.mark.parametrize("head", ["SequenceClassification", "MaskedLM"])  # the second one ties weights
def test_a_model_of_transformers_is_saved_as_its_library_does(tmp_path, head):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 8, "hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = transformers.BertConfig(**sizes, intermediate_size=4, id2label={0: "bad", 1: "good"})
    kind = getattr(transformers, f"BertFor{head}")
    model, other = kind(config), kind(config)
    Trainer(torch.compile(model), None, optimizer=None).save_model(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} >= {"config.json", "model.safetensors"}
    loaded = kind.from_pretrained(tmp_path)
    assert equal(loaded.state_dict(), model.state_dict())
    assert loaded.config.id2label == {0: "bad", 1: "good"}
    trainer = Trainer(other, None, optimizer=None)
    trainer.load_checkpoint(tmp_path)
    assert equal(other.state_dict(), model.state_dict())
    content = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"model.safetensors' is damaged: its content does not match its checksum"):
        trainer.load_checkpoint(tmp_path)


def test_what_cannot_be_saved_is_an_error_that_says_why(tmp_path):
    trainer = quiet_trainer(small_model())
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
        assert equal(whole, dict(create_model().state_dict()))
        assert equal(safetensors.torch.load_file(tmp_path / "sharded" / "model.safetensors"), whole)


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


def test_what_users_write_is_beside_the_weights_of_a_directory(tmp_path, monkeypatch):
    licence = Licence()
    monkeypatch.setitem(MODEL_WRITERS, "licence", licence)
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
    for name in [*MODEL_WRITERS]:
        monkeypatch.delitem(MODEL_WRITERS, name)
    trainer = quiet_trainer(small_model())
    with pytest.raises(ValueError, match=r"card_data=\{'license': 'mit'\} belongs to the extension 'reports', which is not"):
        trainer.save_model(tmp_path, card_data={"license": "mit"})
    trainer.save_model(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
