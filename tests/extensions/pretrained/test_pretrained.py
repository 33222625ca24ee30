"""Models saved in their own library's format, for its loading functions."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.callbacks import SaveBestModelCallback
from tests.adapters import bert, rows, with_lora
from tests.launching import CAN_SHARD
from tests.ranks import world_size
from tests.saved_models import ModelMixin, make_timm
from tests.sharded import gathered, mesh_of
from tests.small_models import adamw_trainer, equal_weights, make_trainer, weights


def files_in(folder: Path) -> set[str]:
    """Return the names of the files in a folder, except the model card and its plot."""
    return {path.name for path in folder.iterdir()} - {"README.md", "curves.png"}


def trained(*callbacks: Any, model: Any = None, lr: float = 0.5, **kwargs: Any) -> Trainer:
    model = bert() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    trainer = Trainer(model, None, optimizer, list(callbacks), seed=0, accelerator=Accelerator(cpu=True))
    trainer.train(rows(), 3, **{"eval_dataset": rows(), "per_device_batch_size": 4} | kwargs)
    return trainer


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    import transformers

    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    return dict(model.state_dict())


def make_tokenizer(word: str = "a") -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"[PAD]": 0, word: 1}, unk_token="[PAD]"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]")


@pytest.mark.thorough
@pytest.mark.extension("model_ema")
def test_transformers_loads_the_best_model_and_the_best_average(tmp_path):
    from pytorch_accel_lite.callbacks import ModelEmaCallback

    pytest.importorskip("transformers")
    paths = best, average = tmp_path / "best.pt", tmp_path / "average.pt"
    trainer = trained(SaveBestModelCallback(best), ModelEmaCallback(0.5, save_path=average), lr=10.0)
    assert trainer.run_history.get_latest_metric("eval_loss_epoch") > torch.load(best)["eval_loss_epoch"]
    trainer.save_model(tmp_path / "saved")
    kept = [torch.load(path)["model_state_dict"] for path in paths]
    assert equal_weights(loaded(tmp_path / "saved"), kept[0])
    assert not equal_weights(*kept)
    trainer.load_checkpoint(average, load_optimizer=False)
    trainer.save_model(tmp_path / "saved")
    assert equal_weights(loaded(tmp_path / "saved"), kept[1])


def save_sharded(folder: Path) -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    model: Any = bert()
    for part in (model.bert.encoder.layer[0], model):
        fully_shard(part, mesh=mesh_of(world_size()))
    trainer = trained(model=model)
    trainer.save_model(folder)
    return gathered(trainer.model.state_dict())


@pytest.mark.thorough
@pytest.mark.processes
@CAN_SHARD
def test_transformers_loads_a_sharded_model(tmp_path, two_ranks):
    pytest.importorskip("transformers")
    for whole in two_ranks.run(save_sharded, tmp_path):
        assert equal_weights(loaded(tmp_path), whole)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["BertForSequenceClassification"]


class Collate:
    """Pads as a collator of transformers does, which holds a tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __call__(self, samples: list[Any]) -> dict[str, torch.Tensor]:
        return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def function_with(tokenizer: Any) -> Any:
    def collate(samples: list[Any]) -> dict[str, torch.Tensor]:
        assert tokenizer
        return Collate(tokenizer)(samples)

    return collate


@pytest.mark.sampled
@pytest.mark.parametrize("collate", [Collate, function_with])
def test_a_tokenizer_used_in_training_is_saved_with_the_model(tmp_path, collate):
    transformers = pytest.importorskip("transformers")
    trainer = trained(collate_fn=collate(make_tokenizer()))
    trainer.save_model(tmp_path)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= files_in(tmp_path)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path)("a")["input_ids"] == [1]


def test_the_trainers_tokenizer_is_saved_among_several(tmp_path):
    transformers = pytest.importorskip("transformers")
    trainer = trained(collate_fn=Collate([make_tokenizer("b"), make_tokenizer("c")]))
    with pytest.warns(UserWarning, match=r"2 tokenizers were used .* Set trainer.tokenizer to the one"):
        trainer.save_model(tmp_path)
    assert files_in(tmp_path) == {"config.json", "model.safetensors"}
    trainer.tokenizer = make_tokenizer("d")
    trainer.save_model(tmp_path)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path)("d")["input_ids"] == [1]


def test_a_processor_is_saved_with_its_tokenizer(tmp_path):
    transformers = pytest.importorskip("transformers")
    processor = transformers.ProcessorMixin.__new__(type("Words", (transformers.ProcessorMixin,), {}))
    processor.tokenizer = make_tokenizer()
    processor.save_pretrained = lambda folder: (Path(folder) / "processor_config.json").write_text("{}")
    trained(collate_fn=Collate(processor)).save_model(tmp_path)
    assert files_in(tmp_path) == {"config.json", "model.safetensors", "processor_config.json"}


def test_adapters_are_saved_with_the_tokenizer(tmp_path):
    peft = pytest.importorskip("peft")
    trainer = trained(model=with_lora(bert()), collate_fn=Collate(make_tokenizer()))
    trainer.save_model(tmp_path)
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= files_in(tmp_path)
    again = peft.PeftModel.from_pretrained(bert(), tmp_path)
    assert equal_weights(again.state_dict(), trainer.get_model().state_dict())


def test_a_model_of_timm_is_saved_with_its_configuration(tmp_path):
    model = make_timm(num_classes=3, in_chans=1)
    adamw_trainer(torch.compile(model)).save_model(tmp_path / "signs")
    assert files_in(tmp_path / "signs") == {"config.json", "model.safetensors"}
    config = json.loads((tmp_path / "signs" / "config.json").read_text())
    assert (config["architecture"], config["num_classes"]) == ("mobilenetv3_small_050", 3)
    other = make_timm(num_classes=3, in_chans=1)
    from timm.models import load_checkpoint

    load_checkpoint(other, str(tmp_path / "signs" / "model.safetensors"))
    assert equal_weights(other.state_dict(), model.state_dict())
    again = make_timm(num_classes=3, in_chans=1)
    adamw_trainer(again).load_checkpoint(tmp_path / "signs")
    assert equal_weights(again.state_dict(), model.state_dict())


def test_a_model_unknown_to_timm_is_saved_without_configuration(tmp_path):
    model = make_timm(num_classes=3)
    model.pretrained_cfg = {**model.pretrained_cfg, "license": object()}
    with pytest.warns(UserWarning, match=r"timm could not describe MobileNetV3, so there is no config.json"):
        adamw_trainer(model).save_model(tmp_path)
    assert files_in(tmp_path) == {"model.safetensors"}


def test_a_model_of_diffusers_is_saved_as_its_library_does(tmp_path, monkeypatch):
    diffusers = ModuleType("diffusers")
    vars(diffusers)["ModelMixin"] = ModelMixin
    monkeypatch.setitem(sys.modules, "diffusers", diffusers)
    model, other = ModelMixin(3), ModelMixin(3)
    adamw_trainer(model).save_model(tmp_path)
    assert files_in(tmp_path) == {"config.json", "diffusion_pytorch_model.safetensors"}
    assert equal_weights(ModelMixin.from_pretrained(tmp_path).state_dict(), model.state_dict())
    adamw_trainer(other).load_checkpoint(tmp_path)
    assert equal_weights(other.state_dict(), model.state_dict())


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
    assert equal_weights(loaded.state_dict(), model.state_dict())
    assert loaded.config.id2label == {0: "bad", 1: "good"}
    trainer = Trainer(other, None, optimizer=None)
    trainer.load_checkpoint(tmp_path)
    assert equal_weights(other.state_dict(), model.state_dict())
    content = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"model.safetensors' is damaged: its content does not match its checksum"):
        trainer.load_checkpoint(tmp_path)


def with_other_adapters(seed: int) -> Any:
    """A model with adapters under two names, all random."""
    from peft import LoraConfig

    model = with_lora(bert(), seed)
    model.add_adapter("other", LoraConfig(task_type="SEQ_CLS", r=3, target_modules=["key"]))
    model.set_adapter("default")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora" in name:
                parameter.uniform_()
    return model


def test_save_model_writes_adapters_that_peft_loads(tmp_path):
    peft = pytest.importorskip("peft")
    model, other = with_other_adapters(seed=1), with_other_adapters(seed=5)
    trainer = make_trainer(model=torch.compile(model))
    trainer.save_model(tmp_path)
    found = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    files = {"adapter_config.json", "adapter_model.safetensors"}
    assert found - {"README.md", "curves.png"} == {*files, *(f"other/{name}" for name in files)}
    loaded = peft.PeftModel.from_pretrained(bert(), tmp_path)
    loaded.load_adapter(tmp_path / "other", "other")
    assert equal_weights(weights(loaded), weights(model))
    assert not equal_weights(weights(other), weights(model))
    make_trainer(model=other).load_checkpoint(tmp_path)
    assert equal_weights(weights(other), weights(model))
    path = tmp_path / "other" / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(ValueError, match=r"other/adapter_model.safetensors' is damaged"):
        make_trainer(model=other).load_checkpoint(tmp_path)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"other/adapter_model.safetensors is missing in .* has that adapter"):
        make_trainer(model=other).load_checkpoint(tmp_path)


def test_adapters_beside_other_trained_weights_are_saved_in_full(tmp_path):
    pytest.importorskip("peft")
    model = with_lora(bert())
    make_trainer(model=model).save_model(tmp_path)
    model.base_model.model.bert.embeddings.word_embeddings.weight.requires_grad_(True)
    with pytest.warns(UserWarning, match=r"would leave out what is trained .*word_embeddings.weight.*modules_to_save"):
        make_trainer(model=model).save_model(tmp_path)
    assert not (tmp_path / "adapter_model.safetensors").exists()
    other = with_lora(bert(7), seed=7)
    make_trainer(model=other).load_checkpoint(tmp_path)
    assert equal_weights(weights(other), weights(model))
