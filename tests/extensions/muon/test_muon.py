"""Muon for matrices with AdamW for the rest: the division of parameters, and training with both."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accel_lite import Trainer, TrainerPlaceholderValues
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from pytorch_accel_lite.optimizers import muon_with_adamw, split_parameters
from tests.launching import HAS_MUON
from tests.ranks import shared_folder, world_size
from tests.small_models import (
    deep_model,
    equal_weights,
    float64_data,
    hand_written_loop,
    largest_difference,
    on_one_process,
    weights,
)

pytestmark = HAS_MUON
DATA = float64_data(24)


class LanguageModel(nn.Module):
    """Embeddings of tokens, tied to the head if asked, and of positions; attention; a norm."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.positions = nn.Parameter(torch.zeros(4, 8))
        self.attention = nn.MultiheadAttention(8, 2)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        if tied:
            self.head.weight = self.tokens.weight


def vision_transformer() -> nn.Module:
    timm = pytest.importorskip("timm")
    return timm.create_model("vit_tiny_patch16_224", depth=1, num_classes=7)


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=40
    )
    return transformers.LlamaForCausalLM(config)


ATTENTION = ["attention.in_proj_weight", "attention.out_proj.weight"]
MODELS: dict[str, tuple[Any, list[str], list[str], list[str]]] = {
    "layers": (deep_model, ["0.weight", "3.weight"], [], ["5.weight"]),
    "a language model": (partial(LanguageModel, False), ATTENTION, ["tokens.weight"], ["head.weight"]),
    "tied weights": (partial(LanguageModel, True), ATTENTION, ["tokens.weight"], []),
    "of timm": (
        vision_transformer,
        [f"blocks.0.{name}.weight" for name in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")],
        [],
        ["head.weight"],
    ),
    "of transformers": (
        llama,
        [f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkvo"]
        + [f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")],
        ["model.embed_tokens.weight"],
        ["lm_head.weight"],
    ),
}


@pytest.mark.parametrize(("create", "matrices", "embeddings", "heads"), MODELS.values(), ids=MODELS)
def test_each_parameter_has_one_kind_and_one_optimizer(create, matrices, embeddings, heads):
    model = create()
    kinds = split_parameters(model)
    assert [*kinds.matrices] == matrices
    assert [*kinds.embeddings] == embeddings
    assert [*kinds.heads] == heads
    assert {**kinds.matrices, **kinds.embeddings, **kinds.heads, **kinds.others} == dict(model.named_parameters())
    muon, adamw = ([p for g in one.param_groups for p in g["params"]] for one in muon_with_adamw(model).values())
    assert set(muon) == {*kinds.matrices.values()}
    assert sorted(map(id, [*muon, *adamw])) == sorted(map(id, model.parameters()))


def test_norms_and_biases_do_not_decay():
    model = LanguageModel(tied=False)
    decayed, plain = muon_with_adamw(model, weight_decay=0.2)["adamw"].param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.2, 0.0)
    assert {*decayed["params"]} == {model.tokens.weight, model.positions, model.head.weight}


def test_frozen_parameters_are_left_out_and_heads_can_be_named():
    model = deep_model()
    model[0].requires_grad_(False)
    kinds = split_parameters(model, heads=[model[3]])
    assert ([*kinds.matrices], [*kinds.heads]) == (["5.weight"], ["3.weight"])
    assert "0.weight" not in str(kinds)
    assert "matrices          1              8  5.weight" in str(kinds)


COSINE = partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=TrainerPlaceholderValues.MAX_NUM_TRAIN_STEPS)


def trained(optimizer: Any, folder: Any = None, model: nn.Module | None = None, **kwargs: Any) -> Trainer:
    states = [] if folder is None else [SaveTrainingStateCallback(folder, save_every_n_steps=1, max_checkpoints=None)]
    model = deep_model() if model is None else model
    trainer = Trainer(model, nn.MSELoss(), optimizer or muon_with_adamw(model, lr=0.02), states, seed=0)
    trainer.train(DATA, 2, per_device_batch_size=8 // world_size(), create_scheduler_fn=COSINE, **kwargs)
    return trainer


def test_training_has_the_bits_of_a_loop_with_both_optimizers():
    model, by_hand = deep_model(), deep_model()
    Trainer(model, nn.MSELoss(), muon_with_adamw(model, lr=0.02), []).train(
        DATA, 2, per_device_batch_size=8, train_dataloader_kwargs={"shuffle": False}
    )
    kinds = split_parameters(by_hand)
    rest = [*kinds.heads.values(), *kinds.others.values()]
    both = [
        torch.optim.Muon(kinds.matrices.values(), lr=0.02, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(
            [
                {"params": [p for p in rest if p.ndim == 2], "weight_decay": 0.1},
                {"params": [p for p in rest if p.ndim == 1], "weight_decay": 0.0},
            ],
            lr=0.02,
            betas=(0.9, 0.95),
        ),
    ]
    both[0].register_step_post_hook(lambda *_: (both[1].step(), both[1].zero_grad()))
    hand_written_loop(by_hand, both[0], torch.utils.data.DataLoader(DATA, 8), epochs=2)
    assert equal_weights(weights(model), weights(by_hand))


def resumed() -> list[dict[str, torch.Tensor]]:
    """Return the weights of a run with the factory, of one resumed in the middle, and of one with the optimizers."""
    factory = partial(muon_with_adamw, lr=0.02)
    with shared_folder() as folder:
        whole = trained(factory, folder / "states")
        state = sorted(path for path in (folder / "states").iterdir() if path.is_dir())[2]
        again = trained(factory, folder / "again", resume_from=state)
    return [weights(trainer.get_model()) for trainer in (whole, again, trained(None))]


@pytest.mark.thorough
def test_runs_resume_to_the_same_bits_on_one_and_two_processes(two_ranks):
    for whole, again, made in (on_one_process(resumed), *two_ranks(resumed)):
        assert equal_weights(whole, again)
        assert equal_weights(whole, made)
        assert largest_difference(whole, on_one_process(resumed)[0]) < 1e-12


@pytest.mark.parametrize(
    ("create", "arguments", "said"),
    [
        (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(4, 2)), {}, "has no trainable matrices within it"),
        (deep_model, {"heads": [nn.Linear(2, 2)]}, "heads has Linear, which is not a module of the model"),
    ],
)
def test_models_that_muon_cannot_divide_are_an_error(create, arguments, said):
    with pytest.raises(ValueError, match=said):
        muon_with_adamw(create(), **arguments)


@pytest.mark.parametrize(
    ("model", "arguments", "said"),
    [
        (deep_model().parameters(), {}, "^model=.* must be a torch.nn.Module, not generator"),
        (nn.Linear, {}, "^model=.* must be an instance, not a class"),
        (deep_model(), {"heads": nn.Linear(2, 2)}, r"^heads=.* must be a list of modules, such as \[model.head\]"),
    ],
    ids=["parameters", "a class", "a head"],
)
def test_muon_says_which_argument_is_no_model(model, arguments, said):
    with pytest.raises(TypeError, match=said):
        muon_with_adamw(model, **arguments)
