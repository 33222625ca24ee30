"""Adapters on a base quantised by bitsandbytes or torchao, which is neither trained nor saved."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.callbacks import SaveBestModelCallback, SaveTrainingStateCallback
from pytorch_accel_lite.checkpoint import read_checkpoint, write_checkpoint
from tests.launching import SOAK
from tests.ranks import run_and_resume, world_size
from tests.small_models import equal_weights, largest_difference, weights

pytest.importorskip("peft")
KINDS = {"int8 of torchao": "torchao", "nf4 of bitsandbytes": "bitsandbytes", "int8 of bitsandbytes": "bitsandbytes"}
pytestmark = pytest.mark.filterwarnings("ignore:.*MatMul8bitLt|.*autograd kernel was not registered")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """How a base is quantised; a package that is not there is skipped."""
    pytest.importorskip(KINDS[request.param])
    return str(request.param)


def settings(kind: str) -> Any:
    """What transformers is told to quantise a model by."""
    import transformers

    if kind == "int8 of torchao":
        from torchao.quantization import Int8WeightOnlyConfig

        return transformers.TorchAoConfig(Int8WeightOnlyConfig())
    if kind == "int8 of bitsandbytes":
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype="float32"
    )


def save_base(folder: Path, seed: int = 0) -> Path:
    """Save a small pretrained language model; the name of its folder is that of the model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=32, num_hidden_layers=2, **sizes)).save_pretrained(folder)
    return folder


def quantised(kind: str, base: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(base, quantization_config=settings(kind), dtype=torch.float32)


def with_lora(kind: str, base: Path, dropout: float = 0.1) -> Any:
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    model = prepare_model_for_kbit_training(quantised(kind, base), use_gradient_checkpointing=False)
    torch.manual_seed(1)
    return get_peft_model(
        model, LoraConfig("CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj"], lora_dropout=dropout)
    )


def rows() -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(32, (16, 6), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in ids]


def train(kind: str, base: Path, folder: Path | None, resume_from: Path | None = None, **kwargs: Any) -> Trainer:
    """Two epochs of two updates, with a state after each, and an evaluation after the first epoch."""
    saving = SaveTrainingStateCallback(folder, save_every_n_steps=1, max_checkpoints=None) if folder else None
    model = with_lora(kind, base, kwargs.pop("dropout", 0.1))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    callbacks = [saving, *kwargs.pop("callbacks", ())]
    trainer = Trainer(model, None, optimizer, callbacks=callbacks, seed=3, **kwargs)
    shares = 1 if "logical_processes" in kwargs else world_size()
    trainer.train(rows(), 2, rows(), per_device_batch_size=8 // shares, resume_from=resume_from)
    return trainer


def adapters(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.get_model().named_parameters() if p.requires_grad}


def state_after(folder: Path, update: int) -> Path:
    return folder / f"update-{update:09}"


@pytest.mark.extension("printed_states")
@pytest.mark.sampled
def test_adapters_resume_to_the_same_bits_without_the_base(kind, tmp_path, capsys):
    from pytorch_accel_lite.checkpoint import print_contents

    base = save_base(tmp_path / "base")
    whole = train(kind, base, tmp_path / "states")
    state = state_after(tmp_path / "states", 3)  # after an evaluation
    assert not [name for name in safetensors.torch.load_file(state / "model.safetensors") if "k_proj" in name]
    assert equal_weights(adapters(train(kind, base, None, state)), adapters(whole))
    print_contents(state)
    assert "left out: " in capsys.readouterr().out
    other = save_base(tmp_path / "other", seed=1)
    with pytest.raises(
        ValueError, match=r"frozen weights .* are not .* state began with '.*base', this model with '.*other'"
    ):
        train(kind, other, None, state)


@pytest.mark.thorough
@pytest.mark.extension("pretrained")
def test_adapters_are_loaded_by_peft_on_a_quantised_base(kind, tmp_path):
    from peft import PeftModel

    base = save_base(tmp_path / "base")
    trainer = train(kind, base, None)
    trainer.save_model(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(quantised(kind, base), tmp_path / "adapter")
    inputs = [{"input_ids": row["input_ids"]} for row in rows()]
    first, second = (each.predict(inputs)["logits"] for each in (trainer, Trainer(loaded, None, None)))
    assert torch.equal(first, second)


@pytest.mark.sampled
@pytest.mark.parametrize("trainable_only", [False, True])
def test_files_lack_the_quantised_weights(kind, tmp_path, trainable_only):
    base = save_base(tmp_path / "base")
    best = SaveBestModelCallback(tmp_path / "best.pt", trainable_only=trainable_only)
    trainer = train(kind, base, None, callbacks=[best])  # loads the best at the end
    path = tmp_path / "all.safetensors"
    trainer.save_model(path, trainable_only=trainable_only)
    names = safetensors.torch.load_file(path).keys()
    assert any("embed_tokens" in name for name in names) is not trainable_only
    assert not any("k_proj" in name or "base_layer" in name for name in names)
    for saved in (path, tmp_path / "best.pt"):
        other = Trainer(with_lora(kind, base), None, None)
        other.load_checkpoint(saved, load_optimizer=False)
        assert equal_weights(adapters(other), adapters(trainer))
    with pytest.warns(UserWarning, match="frozen weights of .* are not those"):
        Trainer(with_lora(kind, save_base(tmp_path / "other", 1)), None, None).load_checkpoint(path)


@pytest.mark.thorough
@pytest.mark.extension("model_ema")
def test_averages_share_the_frozen_base(kind, tmp_path):
    from pytorch_accel_lite.callbacks import ModelEmaCallback

    base = save_base(tmp_path / "base")

    def run(folder: Path | None, resume_from: Path | None = None) -> dict[str, torch.Tensor]:
        ema = ModelEmaCallback(0.5, save_path=tmp_path / "ema.pt", evaluate_during_training=True)
        trainer = train(kind, base, folder, resume_from, callbacks=[ema])
        averaged = dict(ema.ema.module.named_parameters())
        if kind != "int8 of bitsandbytes":  # whose modules keep more beside the weights
            name = "base_model.model.model.layers.0.self_attn.k_proj.weight"
            assert averaged[name] is trainer.get_model().get_parameter(name)
        return {name: averaged[name].clone() for name in adapters(trainer)}

    whole = run(tmp_path / "states")
    assert equal_weights(run(None, state_after(tmp_path / "states", 3)), whole)
    loaded = Trainer(with_lora(kind, base), None, None)
    loaded.load_checkpoint(tmp_path / "ema.pt", load_optimizer=False)
    assert equal_weights(adapters(loaded), whole)


def base_numbers(trainer: Trainer) -> dict[str, int]:
    from pytorch_accel_lite.extension_tools.states_and_files import weight_checksums

    return weight_checksums(weights(trainer.get_model()))


@pytest.mark.thorough
@pytest.mark.extension("checking")
def test_evaluations_and_checks_do_not_change_the_base(kind, tmp_path):
    model = with_lora(kind, save_base(tmp_path / "base"))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    trainer = Trainer(model, None, optimizer, callbacks=[], seed=3)
    before = base_numbers(trainer)
    trainer.evaluate(rows(), per_device_batch_size=8)
    report = trainer.check(rows(), per_device_batch_size=4, only=["runs", "reload", "determinism"])
    assert [check.status for check in report.results] == ["passed"] * 3
    assert base_numbers(trainer) == before


@pytest.mark.thorough
@pytest.mark.extension("blocks")
def test_recomputed_activations_give_the_same_adapters(kind, tmp_path):
    base = save_base(tmp_path / "base")
    plain, recomputed = (train(kind, base, None, activation_checkpointing=value) for value in (False, True))
    assert equal_weights(adapters(plain), adapters(recomputed))


def of_processes(kind: str, base: Path, logical: bool, folder: Path, resume_from: Path | None = None) -> Trainer:
    options: dict[str, Any] = {"logical_processes": 2} if logical else {"dropout": 0.0}
    return train(kind, base, folder, resume_from, **options)


def resumed(kind: str, base: Path, logical: bool) -> list[Any]:
    return run_and_resume(partial(of_processes, kind, base, logical), adapters)


@pytest.mark.thorough
@pytest.mark.soak
@pytest.mark.parametrize("logical", [False, *[True] * SOAK])
@pytest.mark.processes
def test_processes_train_and_resume_adapters(kind, tmp_path, two_ranks, logical):
    base = save_base(tmp_path / "base")
    alone = adapters(of_processes(kind, base, logical, tmp_path / "alone"))
    for whole, *others in two_ranks.run(resumed, kind, base, logical):
        assert all(equal_weights(other, whole) for other in others)
        assert equal_weights(whole, alone) if logical else largest_difference(whole, alone) < 1e-3


def test_a_quantised_head_cannot_be_trained(tmp_path):
    pytest.importorskip("torchao")
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig("CAUSAL_LM", target_modules=["q_proj"], modules_to_save=["k_proj"])
    model = get_peft_model(quantised("int8 of torchao", save_base(tmp_path / "base")), lora)
    trainer = Trainer(model, None, torch.optim.AdamW(model.parameters()), callbacks=[])
    with pytest.raises(ValueError, match=r"k_proj.* would be trained, but are quantised.*modules_to_not_convert"):
        trainer.train(rows(), 1)
    assert trainer.progress.update == 0


def test_memory_cannot_be_estimated_with_bitsandbytes(tmp_path):
    pytest.importorskip("bitsandbytes")
    model = with_lora("nf4 of bitsandbytes", save_base(tmp_path / "base"))
    trainer = Trainer(model, None, torch.optim.AdamW(model.parameters()), callbacks=[])
    with pytest.raises(ValueError, match=r"without values, and PeftModelForCausalLM has weights of bitsandbytes"):
        trainer.estimate_memory(rows())


def test_a_quantised_tensor_in_a_checkpoint_can_be_loaded(tmp_path):
    pytest.importorskip("torchao")
    model = quantised("int8 of torchao", save_base(tmp_path / "base"))
    weight = model.model.layers[0].self_attn.k_proj.weight
    write_checkpoint({"model_state_dict": {}, "my_entry": weight}, tmp_path / "model.pt")
    loaded = read_checkpoint(tmp_path / "model.pt")["my_entry"]
    assert type(loaded) is type(weight)
    assert torch.equal(loaded.dequantize(), weight.dequantize())
