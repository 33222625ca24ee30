"""Models and training states on the Hugging Face Hub, with its peculiarities."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from tests.extensions.remote.hub_store import HubStore
from tests.launching import CAN_SHARD, ROOT
from tests.saved_models import saved_sharded, trained
from tests.sharded import create_model
from tests.small_models import adamw_trainer, equal_weights, float64_model


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """The folder of the repository ``hf://me/waves``, as it is on the Hub."""
    HubStore.folder = tmp_path / "hub"
    HubStore.clear_instance_cache()
    (HubStore.folder / "me" / "waves").mkdir(parents=True)
    return HubStore.folder / "me" / "waves"


def commits() -> list[str]:
    return (HubStore.folder / "commits").read_text().splitlines()


def test_a_model_is_saved_on_the_hub_and_loaded_from_there(hub):
    trainer = trained()
    trainer.save_model("hf://me/waves")
    assert commits()[0] == "write me/waves/model.safetensors"
    trainer.save_model("hf://me/waves/inner/alone.safetensors")
    for url in ("hf://me/waves", "hf://me/waves/inner/alone.safetensors"):
        model = float64_model(1)
        adamw_trainer(model).load_checkpoint(url)
        assert equal_weights(model.state_dict(), trainer.get_model().state_dict())
    with pytest.raises(FileNotFoundError, match=r"no checkpoint at 'hf://me/waves/other': it has no weights"):
        trainer.load_checkpoint("hf://me/waves/other")
    with pytest.raises(OSError, match=r"hf://me/other/model.safetensors cannot be written: .*Make sure that it exists"):
        trainer.save_model("hf://me/other")


@pytest.mark.extension("reports")
def test_a_model_card_is_written_last(hub):
    trained().save_model("hf://me/waves")
    assert commits() == [f"write me/waves/{name}" for name in ("model.safetensors", "curves.png", "README.md")]
    assert ModelCard.load(hub / "README.md").data.model_name == "waves"


def test_the_callback_of_the_page_uploads_every_few_epochs(hub, tmp_path, monkeypatch):
    uploads: list[str] = []

    def upload_folder(repo_id: str, folder_path: str, commit_message: str) -> None:
        shutil.copytree(folder_path, HubStore.folder / repo_id, dirs_exist_ok=True)
        uploads.append(commit_message)

    monkeypatch.setattr("huggingface_hub.upload_folder", upload_folder)
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "exporting.md").read_text()
    [code] = [code for code in re.findall(r"^```py\n(.*?)^```$", page, re.M | re.S) if "class PushToHub" in code]
    (HubStore.folder / "my_name" / "signs").mkdir(parents=True)
    program: dict[str, Any] = {}
    exec(code, program)
    trainer = trained(program["PushToHub"](), epochs=10)
    assert uploads == ["Epoch 5", "Epoch 10"]
    model = float64_model(1)
    adamw_trainer(model).load_checkpoint("hf://my_name/signs")
    assert equal_weights(model.state_dict(), trainer.get_model().state_dict())


@pytest.mark.extension("reports")
def test_a_foreign_card_on_the_hub_is_kept(hub):
    trainer = trained(epochs=1)
    with pytest.raises(FileNotFoundError):
        trainer.load_checkpoint("hf://me/waves")  # the listing of this process is out of date from now on
    (hub / "README.md").write_text("ours")
    with pytest.warns(UserWarning, match=r"'hf://me/waves/README.md' was not written by save_model\(\)"):
        trainer.save_model("hf://me/waves")
    assert (hub / "README.md").read_text() == "ours"
    assert commits() == ["write me/waves/model.safetensors"]


def test_training_states_on_the_hub_resume_to_the_same_bits(hub, tmp_path, capsys):
    def run(epochs: int, save_dir: Any) -> Trainer:
        saving = SaveTrainingStateCallback(save_dir, save_every_n_epochs=1, max_checkpoints=2)
        return trained(saving, epochs=epochs, resume_from="latest")

    whole = run(4, tmp_path / "states")
    run(2, "hf://me/waves/states")
    resumed = run(4, "hf://me/waves/states")
    assert "Resuming from 'hf://me/waves/states/update-000000006'" in capsys.readouterr().out
    assert equal_weights(resumed.get_model().state_dict(), whole.get_model().state_dict())
    assert sorted(path.name for path in (hub / "states").glob("update-*")) == ["update-000000009", "update-000000012"]


def states_on_the_hub(folder: Path) -> tuple[Any, Any]:
    """A whole run, and one that resumes from its state on the Hub after two epochs."""
    HubStore.folder = folder / "hub"

    def run(epochs: int, save_dir: Any) -> Any:
        saving = SaveTrainingStateCallback(save_dir, save_every_n_epochs=1, max_checkpoints=1, asynchronous=True)
        return trained(saving, epochs=epochs, resume_from="latest").get_model().state_dict()

    whole = run(3, folder / "states")
    run(2, "hf://me/waves/states")
    return whole, run(3, "hf://me/waves/states")


@pytest.mark.thorough
@pytest.mark.processes
def test_ranks_save_their_states_on_the_hub(tmp_path, two_ranks, hub):
    for whole, resumed in two_ranks.run(states_on_the_hub, tmp_path):
        assert equal_weights(whole, resumed)
    [state] = (hub / "states").glob("update-*")
    assert {path.name for path in state.glob("files-*/*")} >= {"rank00000.pt", "rank00001.pt", "model.safetensors"}


def sharded_on_the_hub(folder: Path) -> dict[str, Any]:
    HubStore.folder = folder / "hub"
    return saved_sharded(folder, "hf://me/waves")


@pytest.mark.processes
@CAN_SHARD
def test_all_processes_save_a_sharded_model_on_the_hub(tmp_path, two_ranks, hub):
    for whole in two_ranks.run(sharded_on_the_hub, tmp_path):
        assert equal_weights(whole, dict(create_model().state_dict()))


def test_a_url_without_a_store_is_an_error():
    with pytest.raises(ValueError, match=r"path='nowhere://me/waves' names no store that fsspec knows .* hf://"):
        adamw_trainer(float64_model()).save_model("nowhere://me/waves")
