"""Model cards, and the libraries that read them."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import safetensors.torch
import torch
from huggingface_hub import ModelCard
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MeanSquaredError, R2Score

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.callbacks import EarlyStoppingCallback, RunLogCallback, SaveBestModelCallback
from tests.adapters import bert, with_lora
from tests.launching import CAN_SHARD
from tests.saved_models import DATA, OTHER_DATA, ModelMixin, make_timm, saved_sharded, trained
from tests.small_models import adamw_trainer, equal_weights, float64_model, listener, raises_at

LOADER = DataLoader(OTHER_DATA, 4)


def results(folder: Path) -> list[Any]:
    """The results in the metadata of a card."""
    found: list[Any] = ModelCard.load(folder / "README.md").data.eval_results
    return found


def section(folder: Path, title: str) -> str:
    """The part of a card under a heading."""
    return (folder / "README.md").read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def lead(folder: Path) -> str:
    """The paragraphs of a card below its heading."""
    return (folder / "README.md").read_text().partition("\n# ")[2].partition("\n\n")[2].partition("\n\n## ")[0]


def row(folder: Path, name: str) -> list[str]:
    """The other cells of a row of a table in a card."""
    [line] = [line for line in (folder / "README.md").read_text().splitlines() if line.startswith(f"| {name} |")]
    return [cell.strip() for cell in line.strip("|").split(" |")[1:]]


@pytest.mark.extension("metrics")
def test_a_saved_model_has_weights_curves_and_a_card(tmp_path):
    from pytorch_accel_lite.callbacks import MetricsCallback

    trainer = trained(
        MetricsCallback({"r2": R2Score()}), RunLogCallback(tmp_path / "log", {"idea": "<wider> | deeper"})
    )
    trainer.save_model(tmp_path / "waves")
    folder = tmp_path / "waves"
    assert {path.name for path in folder.iterdir()} == {"model.safetensors", "README.md", "curves.png"}
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "](curves.png)" in section(folder, "Results")
    assert lead(folder) == "Sequential, 57 parameters.\n\nTrained up to epoch 3 of 3: 9 updates with 72 samples in all."
    history = trainer.run_history
    assert row(folder, "r2") == [f"{history['r2'][-1]:.4f}"]
    assert row(folder, "train loss") == [f"{history['train_loss_epoch'][-1]:.4f}"]
    assert row(folder, "Training data") == ["TensorDataset, 24 samples"]
    assert row(folder, "Optimizer") == ["AdamW(lr=0.01)"]
    assert row(folder, "Batch size") == ["8 per process"]
    assert row(folder, "Seed") == ["0"]
    assert r"| idea | &lt;wider> \| deeper |" in section(folder, "Training")
    assert f"torch {torch.__version__.partition('+')[0]}" in row(folder, "Versions")[0]
    assert "(0): Linear(in_features=5, out_features=8, bias=True)" in section(folder, "Model")


def test_the_code_of_a_card_loads_the_model(tmp_path, monkeypatch):
    trainer = trained()
    trainer.save_model(tmp_path)
    plain, ours = re.findall(r"```python\n(.*?)```", (tmp_path / "README.md").read_text(), re.DOTALL)
    assert "from torch.nn import Sequential\n" in plain
    layers = "nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()  #"
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"nn": nn, "samples": list(OTHER_DATA.tensors[0])}
    exec(plain.replace("...)  #", layers), names)
    assert equal_weights(names["model"].state_dict(), trainer.get_model().state_dict())
    nn.init.zeros_(names["model"][0].weight)
    exec(ours, names)
    assert torch.equal(names["predictions"], trainer.predict(OTHER_DATA.tensors[0]))


class Outer:
    class Inner(nn.Linear):
        """A class that cannot be imported by its name."""


class Wide(nn.Linear):
    """A class that can."""


def test_the_code_of_a_card_has_working_imports(tmp_path):
    class Local(nn.Linear):
        pass

    for model in (Wide(5, 1), Outer.Inner(5, 1), Local(5, 1)):
        adamw_trainer(model.double()).save_model(tmp_path)
        name = type(model).__name__
        code = section(tmp_path, "How to load it")
        assert f"\nmodel = {name}(...)  # created as it was for training" in code
        assert (f"from {__name__} import Wide\n" in code) == (name == "Wide")


@pytest.mark.extension("metrics")
def test_the_library_of_the_hub_reads_the_metadata(tmp_path):
    from pytorch_accel_lite.callbacks import MetricsCallback

    trainer = trained(MetricsCallback({"mse": MeanSquaredError()}))
    trainer.evaluate(DATA)
    given = {"license": "mit", "datasets": ["me/waves"], "tags": ["sine"], "pipeline_tag": "tabular-regression"}
    trainer.save_model(tmp_path / "waves", card_data=given)
    card = ModelCard.load(tmp_path / "waves" / "README.md")
    data = card.data.to_dict()
    assert data.items() > {"license": "mit", "datasets": ["me/waves"], "library_name": "pytorch"}.items()
    assert data["tags"] == ["sine"]
    history = trainer.run_history
    found = {(it.dataset_split, it.metric_type): it.metric_value for it in results(tmp_path / "waves")}
    assert found == {
        ("validation", "loss"): history["eval_loss_epoch"][-1],
        ("validation", "mse"): history["mse"][-2],
        ("test", "loss"): history["evaluation_loss"][-1],
        ("test", "mse"): history["mse"][-1],
    }
    assert {(it.task_type, it.dataset_name) for it in card.data.eval_results} == {("tabular-regression", "me/waves")}
    assert row(tmp_path / "waves", "Data evaluated afterwards") == ["TensorDataset, 24 samples"]
    assert card.data.model_name == "waves"
    assert ModelCard(str(card)).data.to_dict() == data
    assert row(tmp_path / "waves", "mse") == [f"{value:.4f}" for value in history["mse"][-2:]]


@pytest.mark.extension("model_ema")
def test_each_evaluation_dataset_has_its_own_results(tmp_path):
    from pytorch_accel_lite.callbacks import ModelEmaCallback

    average = ModelEmaCallback(decay=0.5, watch_metric="ema_model_easy_eval_loss_epoch")
    trained(average, eval_dataset={"easy": DATA, "hard_ones": OTHER_DATA}).save_model(tmp_path)
    assert [(it.dataset_config, it.metric_type) for it in results(tmp_path)] == [
        ("easy", "loss"),
        ("hard ones", "loss"),
    ]
    assert len(row(tmp_path, "ema model easy eval loss")) == 1


def test_the_card_says_which_weights_are_saved(tmp_path):
    values = {1: 3.0, 2: 1.0, 3: 2.0}
    score = listener(
        on_eval_epoch_end=lambda trainer, **_: trainer.run_history.update_metric(
            "score", values[trainer.progress.epoch]
        )
    )
    best = SaveBestModelCallback(tmp_path / "best.pt", "score", greater_is_better=False, keep=3)
    trainer = trained(score, best)
    trainer.save_model(tmp_path / "best")
    assert "The weights were loaded from `best.pt` (score 1, epoch 2)." in lead(tmp_path / "best")
    assert row(tmp_path / "best", "metric")[0] == "epoch 2, saved here"
    assert row(tmp_path / "best", "score")[0] == "1.0000"
    [result] = [it for it in results(tmp_path / "best") if it.metric_type == "score"]
    assert result.metric_value == 1.0
    trainer.evaluate(DATA)
    trainer.load_checkpoint(tmp_path / "best-epoch0003.pt")
    trainer.save_model(tmp_path / "third")
    assert "The weights were loaded from `best-epoch0003.pt` (score 2, epoch 3)." in lead(tmp_path / "third")
    assert row(tmp_path / "third", "eval loss")[0] == f"{trainer.run_history['eval_loss_epoch'][2]:.4f}"
    assert "evaluated afterwards" not in section(tmp_path / "third", "Results")  # as others were evaluated


@pytest.mark.extension("metrics")
def test_a_later_evaluation_of_the_same_data_replaces_values(tmp_path):
    from pytorch_accel_lite.callbacks import MetricsCallback

    trainer = trained(MetricsCallback({"mse": MeanSquaredError()}))
    trainer.loss_func = nn.L1Loss()
    loss = trainer.evaluate(OTHER_DATA)["evaluation_loss"]
    assert loss != trainer.run_history["eval_loss_epoch"][-1]
    trainer.save_model(tmp_path)
    found = [(it.dataset_split, it.metric_type, it.metric_value) for it in results(tmp_path)]
    assert found == [("validation", "loss", loss), ("validation", "mse", trainer.run_history["mse"][-1])]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("after", "split"),
    [(None, "validation"), (LOADER, "validation"), (OTHER_DATA, "validation"), (DataLoader(OTHER_DATA, 5), "test")],
)
def test_a_card_knows_loaders_of_the_same_data(tmp_path, after, split):
    trainer = trained(eval_dataset=LOADER)
    loss = trainer.evaluate(after)["evaluation_loss"]
    trainer.save_model(tmp_path)
    assert (split, loss) in [(it.dataset_split, it.metric_value) for it in results(tmp_path)]
    assert row(tmp_path, "Data evaluated afterwards") == [f"TensorDataset, {len(OTHER_DATA)} samples"]


def test_metrics_of_loaded_weights_are_of_a_later_evaluation(tmp_path):
    adamw_trainer(float64_model(1)).save_checkpoint(tmp_path / "other.pt", {"epoch": 1, "eval_loss_epoch": 9.0})
    trainer = trained()
    trainer.load_checkpoint(tmp_path / "other.pt")
    trainer.save_model(tmp_path)
    assert "The weights were loaded from `other.pt` (epoch 1, eval_loss_epoch 9)." in lead(tmp_path)
    assert ModelCard.load(tmp_path / "README.md").data.eval_results is None
    loss = trainer.evaluate(OTHER_DATA)["evaluation_loss"]
    trainer.save_model(tmp_path)
    assert [it.metric_value for it in results(tmp_path)] == [loss]
    trainer.train(DATA, 1, eval_dataset=OTHER_DATA)
    trainer.save_model(tmp_path)
    assert "loaded" not in lead(tmp_path)


def test_the_card_says_how_the_training_ended(tmp_path):
    trained(EarlyStoppingCallback(1, 1e9), epochs=5).save_model(tmp_path)
    assert "Trained up to epoch 2 of 5: 6 updates" in lead(tmp_path)
    assert "Stopped early: " in lead(tmp_path)
    save = listener(on_train_epoch_end=lambda trainer: trainer.save_model(tmp_path / f"{trainer.progress.epoch}"))
    trained(save, epochs=2)
    assert "Trained up to epoch 1 of 2: 3 updates with 24 samples" in lead(tmp_path / "1")

    trainer = adamw_trainer(float64_model(), callbacks=[raises_at(4, ArithmeticError())])
    with pytest.raises(ArithmeticError):
        trainer.train(DATA, 2, per_device_batch_size=8)
    trainer.save_model(tmp_path)
    assert "Trained up to epoch 2 of 2: 4 updates" in lead(tmp_path)
    assert "An error has ended the training." in lead(tmp_path)


def test_a_model_that_was_never_trained_has_a_card(tmp_path):
    trainer = Trainer(float64_model(), nn.MSELoss(), optimizer=None)
    trainer.save_model(tmp_path / "new")
    assert lead(tmp_path / "new") == (
        "Sequential, 57 parameters.\n\nIt has not been trained by the program that saved it."
    )
    assert section(tmp_path / "new", "Training") == section(tmp_path / "new", "Results") == ""
    assert not (tmp_path / "new" / "curves.png").exists()
    assert "model-index" not in ModelCard.load(tmp_path / "new" / "README.md").data.to_dict()
    trainer.evaluate(OTHER_DATA)
    trainer.save_model(tmp_path / "new")
    assert row(tmp_path / "new", "eval loss") == [f"{trainer.run_history['evaluation_loss'][0]:.4f}"]


def test_a_foreign_model_card_is_kept(tmp_path):
    trainer = trained(epochs=1)
    trainer.save_model(tmp_path)
    before = (tmp_path / "README.md").read_text()
    assert "Trained up to epoch 1 of 1:" in before
    trainer.train(DATA, 2)
    trainer.save_model(tmp_path)
    assert "Trained up to epoch 2 of 2:" in (tmp_path / "README.md").read_text()
    edited = "".join(line for line in before.splitlines(keepends=True) if "<!--" not in line)
    (tmp_path / "README.md").write_text(edited)
    with pytest.warns(UserWarning, match=r"README.md' was not written by save_model\(\), so it is kept. Rename it"):
        trainer.save_model(tmp_path)
    assert (tmp_path / "README.md").read_text() == edited
    assert equal_weights(
        safetensors.torch.load_file(tmp_path / "model.safetensors"), dict(trainer.get_model().state_dict())
    )


def test_without_matplotlib_there_are_no_curves(tmp_path, monkeypatch):
    trainer = trained()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    trainer.save_model(tmp_path)
    assert not (tmp_path / "curves.png").exists()
    assert "curves.png" not in (tmp_path / "README.md").read_text()


def test_frozen_weights_may_be_left_out(tmp_path):
    model = float64_model()
    model[0].requires_grad_(False)
    trainer = trained(model=model)
    trainer.save_model(tmp_path, trainable_only=True)
    assert safetensors.torch.load_file(tmp_path / "model.safetensors").keys() == {"2.weight", "2.bias"}
    assert "57 parameters, 9 of them trainable" in lead(tmp_path)
    assert "holds only the weights that were trained" in lead(tmp_path)
    assert "strict=False" in section(tmp_path, "How to load it")
    other = float64_model()
    adamw_trainer(other).load_checkpoint(tmp_path)
    assert equal_weights(other.state_dict(), model.state_dict())


@pytest.mark.extension("pretrained")
def test_the_card_of_a_model_of_transformers_says_how_to_load_it(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=8, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4
    )
    model = transformers.BertForSequenceClassification(config)
    trainer = Trainer(model, None, optimizer=None)
    model.save_pretrained(tmp_path)
    nn.init.ones_(model.classifier.weight)
    trainer.save_model(tmp_path)
    assert 'BertForSequenceClassification.from_pretrained(".")' in section(tmp_path, "How to load it")
    assert "from transformers import BertForSequenceClassification" in section(tmp_path, "How to load it")
    loaded = transformers.BertForSequenceClassification.from_pretrained(tmp_path)
    assert equal_weights(loaded.state_dict(), model.state_dict())


@pytest.mark.extension("pretrained")
def test_the_card_of_a_model_of_timm_says_how_to_load_it(tmp_path, monkeypatch):
    model = make_timm(num_classes=3, in_chans=1)
    adamw_trainer(torch.compile(model)).save_model(tmp_path / "signs")
    if not hasattr(pytest.importorskip("timm.models._factory"), "_MODEL_SOURCES"):
        pytest.skip("this version of timm does not load local folders")
    monkeypatch.chdir(tmp_path)
    program: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", (tmp_path / "signs" / "README.md").read_text(), re.DOTALL)[0], program)
    assert equal_weights(program["model"].state_dict(), model.state_dict())


@pytest.mark.extension("pretrained")
def test_without_a_configuration_the_card_loads_plain_weights(tmp_path):
    model = make_timm(num_classes=3)
    model.pretrained_cfg = {**model.pretrained_cfg, "license": object()}
    with pytest.warns(UserWarning, match="timm could not describe"):
        adamw_trainer(model).save_model(tmp_path)
    assert "import timm" not in section(tmp_path, "How to load it")


@pytest.mark.extension("pretrained")
def test_the_card_of_a_model_of_diffusers_says_how_to_load_it(tmp_path, monkeypatch):
    diffusers = ModuleType("diffusers")
    vars(diffusers)["ModelMixin"] = ModelMixin
    monkeypatch.setitem(sys.modules, "diffusers", diffusers)
    adamw_trainer(ModelMixin(3)).save_model(tmp_path)
    assert 'ModelMixin.from_pretrained(".")' in section(tmp_path, "How to load it")


@pytest.mark.extension("pretrained")
def test_the_card_of_adapters_says_how_to_load_them(tmp_path):
    pytest.importorskip("peft")
    adamw_trainer(with_lora(bert())).save_model(tmp_path)
    assert 'PeftModel.from_pretrained(base_model, ".")' in section(tmp_path, "How to load it")


def test_metadata_that_cannot_be_written_are_refused(tmp_path):
    trainer = adamw_trainer(float64_model())
    with pytest.raises(ValueError, match=r"card_data=.* is for a model card, but path='a.safetensors' is one file"):
        trainer.save_model("a.safetensors", card_data={"license": "mit"})
    with pytest.raises(TypeError, match=r"card_data='mit' must be a dict of the card's metadata"):
        trainer.save_model(tmp_path, card_data="mit")
    with pytest.raises(TypeError, match=r"card_data=\{'license': <object .*>\} must be a dict .*: Object of type"):
        trainer.save_model(tmp_path, card_data={"license": object()})
    assert not [*tmp_path.iterdir()]


@pytest.mark.processes
@CAN_SHARD
def test_a_sharded_model_has_the_card_of_an_unsharded_one(tmp_path, two_ranks):
    two_ranks.run(saved_sharded, tmp_path)
    assert lead(tmp_path / "sharded").startswith("Sequential, 121 parameters.\n\nIt has not")
