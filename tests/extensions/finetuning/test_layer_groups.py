"""Groups of layers by depth: what is frozen, unfrozen and given a learning rate together."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import timm
import torch
from torch import nn

from pytorch_accel_lite.finetuning import ModelFreezer, layer_group_parameters
from tests import ancestor as ancestors
from tests.adapters import SIZES, bert, rows, with_lora
from tests.extensions.finetuning.groups_of_layers import in_groups
from tests.small_models import adamw_trainer

transformers = pytest.importorskip("transformers")


def block() -> nn.Module:
    return nn.TransformerEncoderLayer(4, 1, 4)


class Decoder(nn.Module):
    """Its embeddings come after the blocks, and the head shares their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.zeros(4))
        self.blocks = nn.Sequential(block(), block())
        self.norm = nn.LayerNorm(4)
        self.embed = nn.Embedding(7, 4)
        self.heads = nn.ModuleList([nn.Linear(4, 7, bias=False), nn.Linear(4, 2)])
        self.heads[0].weight = self.embed.weight


class OnTop(nn.Module):
    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)) for _ in range(2))


def gpt2() -> nn.Module:
    sizes = {"n_layer": 2, "n_embd": 8, "n_head": 1, "vocab_size": 20}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2))


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def t5() -> nn.Module:
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 2, "num_heads": 2, "vocab_size": 20}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))


def vit() -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", pretrained=False, depth=2, embed_dim=6, num_heads=1, img_size=32)


GROUPS = {
    bert: ["bert.embeddings", "bert.encoder.layer.0", "bert.encoder.layer.1, bert.pooler", "dropout, classifier"],
    gpt2: [
        "transformer.wte, transformer.wpe, transformer.drop",
        "transformer.h.0",
        "transformer.h.1, transformer.ln_f",  # the head has no weights of its own
    ],
    llama: ["model.embed_tokens", "model.layers.0", "model.layers.1, model.norm, model.rotary_emb", "lm_head"],
    t5: [
        "shared, encoder.embed_tokens, decoder.embed_tokens",
        "encoder.block.0",
        "encoder.block.1, encoder.final_layer_norm, encoder.dropout",
        "decoder.block.0",
        "decoder.block.1, decoder.final_layer_norm, decoder.dropout",
    ],
    vit: ["patch_embed, pos_drop, patch_drop, norm_pre", "blocks.0", "blocks.1, norm, fc_norm", "head_drop, head"],
    Decoder: ["embed", "blocks.0", "blocks.1, norm", "heads"],
}


def modules(model: nn.Module, **kwargs: Any) -> list[str]:
    """The modules of each group, as the freezer shows them."""
    return [line.split(maxsplit=2)[2] for line in repr(ModelFreezer(model, **kwargs)).splitlines()[1:]]


@pytest.mark.slow
@pytest.mark.parametrize("make", GROUPS, ids=lambda make: make.__name__)
def test_the_groups_are_embeddings_blocks_and_head(make):
    model = make()
    expected = GROUPS[make]
    if make is t5 and model.shared is model.encoder.embed_tokens:  # in transformers 4, they are one module
        expected = ["shared", *expected[1:]]
    assert modules(model) == expected
    found = in_groups(model)
    assert sorted(name for group in found for name in group) == sorted(name for name, _ in model.named_parameters())
    for wrapped, prefix in ((nn.Sequential(model), "0."), (torch.compile(model), "_orig_mod.")):
        assert [{prefix + name for name in group} for group in found] == in_groups(wrapped)


def test_shared_and_other_parameters_are_in_the_first_group():
    assert in_groups(Decoder())[0] == {"start", "embed.weight"}
    assert "cls_token" in in_groups(vit())[0]
    assert "transformer.wte.weight" in in_groups(gpt2())[0]


def test_stages_are_blocks_and_heads_are_not():
    assert modules(OnTop(nn.ModuleList(block() for _ in range(4)))) == [*(f"backbone.{n}" for n in range(4)), "heads"]
    resnet = timm.create_model("resnet18", pretrained=False, num_classes=0)
    stages = [f"backbone.layer{number}" for number in range(1, 5)]
    assert modules(OnTop(resnet)) == ["backbone.conv1", "backbone.bn1", *stages, "heads"]
    convnext = timm.create_model("convnext_atto", pretrained=False, depths=(1, 2, 3, 1), dims=(4, 4, 4, 4))
    assert modules(convnext)[1:4] == [f"stages.{number}" for number in range(3)]


def test_without_blocks_the_models_attributes_are_the_groups():
    model = nn.Sequential()
    model.stem = nn.Sequential(block(), block())
    model.body = nn.ModuleDict({str(number): nn.Linear(2, 2) for number in range(99)})
    assert modules(model) == ["stem", "body"]
    assert modules(nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1))) == ["0", "1", "2"]
    assert modules(nn.Linear(1, 1)) == []


@pytest.mark.parametrize("make", [bert, llama, vit])
def test_freezing_all_but_the_head_is_as_in_the_ancestor(make):
    ancestors.skip_without_it()
    freezers = ModelFreezer, importlib.import_module("pytorch_accelerated.finetuning").ModelFreezer
    trained = []
    for freezer in freezers:
        model = make()
        freezer(model).freeze()
        trained.append([n for n, p in model.named_parameters() if p.requires_grad and "." in n])  # not a class token
    assert trained[0] == trained[1]


def test_blocks_are_frozen_by_their_indices():
    model = bert()
    freezer = ModelFreezer(model)
    freezer.freeze(0, 1, set_modules_as_eval=True)
    assert [group.is_frozen for group in freezer.get_layer_groups()] == [True, True, False, False]
    model.train()
    adamw_trainer(model).model(**{key: value[None] for key, value in rows(1)[0].items()})
    in_evaluation = {name for name, module in model.named_modules() if not module.training}
    assert {"bert.embeddings.dropout", "bert.encoder.layer.0.attention.output.dropout"} <= in_evaluation
    assert not any(name.startswith(("bert.encoder.layer.1", "bert.pooler", "dropout")) for name in in_evaluation)
    assert freezer.unfreeze(1, -1).keys() == {1}
    assert [group.is_frozen for group in freezer.get_layer_groups()] == [True, False, False, False]


def test_layer_groups_may_be_passed():
    model = bert()
    assert modules(model, groups=list(model.children())) == ["bert", "dropout", "classifier"]
    layers = model.bert.encoder.layer
    assert modules(model, groups=[layers[:2], model.classifier])[0] == "bert.encoder.layer.0, bert.encoder.layer.1"
    given = [layers[0], [layers[1], model.bert.pooler], model.classifier]
    groups = layer_group_parameters(model, lr=1.0, decay=0.1, groups=given)
    assert [group["lr"] for group in groups] == pytest.approx([0.01, 0.1, 1.0])
    assert any(p is model.bert.embeddings.LayerNorm.bias for p in groups[0]["params"])  # in none of them
    factor = layer_group_parameters(model, lr=1.0, decay=0.1, groups=[model.bert, model.classifier])
    assert [(group["lr"], len(group["params"])) for group in factor] == [(0.1, 39), (1.0, 2)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda model: ["bert"], r"groups\[0\] has 'bert', which is not a module of the model"),
        (lambda model: [[]], r"groups=\[\[\]\] has no modules. Pass modules of the model"),
        (lambda model: [model.bert, nn.Tanh()], r"groups\[1\] has Tanh\(\), which is not a module of the model"),
        (
            lambda model: [[model.classifier, model.bert], model.bert.pooler],
            r"groups\[1\] and groups\[0\] both have BertPooler. Pass each module in one group",
        ),
    ],
)
def test_groups_that_are_wrong_are_errors(given, message):
    model = bert()
    with pytest.raises(ValueError, match=message):
        ModelFreezer(model, groups=given(model))


def test_learning_rates_fall_with_depth():
    def layerwise(model):
        return torch.optim.AdamW(layer_group_parameters(model, lr=0.8, decay=0.5))

    trainer = adamw_trainer(bert(), optimizer=layerwise)
    trainer.loss_func = None
    trainer.train(rows(), 1)
    assert [group["lr"] for group in trainer.optimizer.param_groups] == pytest.approx([0.1, 0.2, 0.4, 0.8])


def test_adapters_have_rates_by_depth_and_base_weights_freeze():
    pytest.importorskip("peft")
    model = with_lora(bert())
    groups = layer_group_parameters(model, lr=0.8, decay=0.5)
    assert [(group["lr"], len(group["params"])) for group in groups] == [(0.2, 4), (0.4, 4), (0.8, 2)]
    assert all(p.requires_grad for group in groups for p in group["params"])
    with pytest.raises(ValueError, match=r"would unfreeze the base weights of PeftModelFor.*layers_to_transform"):
        ModelFreezer(model)
