"""Activation checkpointing and compilation of a model's blocks: the same bits and names in any kind of run."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import fully_shard

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.checkpoint.models.weights import full_state_dict
from pytorch_accel_lite.utils import format_bytes
from tests.launching import CAN_SHARD, SOAK
from tests.ranks import world_size
from tests.sharded import mesh_of
from tests.small_models import (
    Blocks,
    adamw_trainer,
    equal_weights,
    float64_data,
    image_model,
    largest_difference,
    weights,
)

DATA = float64_data(26)
# torch looks at the gradients of what a graph is given; it ignores the warning itself unless warnings are errors.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


class Block(nn.Module):
    """A block with dropout and a buffer that changes in each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.3)
        self.weighted = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weighted(self.drop(torch.tanh(self.norm(self.layer(x)))))


class RandomBlock(Block):
    """A block that also uses the generators of python and numpy."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = random.random() + np.random.random() if self.training else 1.0
        return x + scale * super().forward(x).sin()


class StatelessBlock(nn.Module):
    """A block without buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh(), nn.Dropout(0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


class Repeats(nn.Module):
    def __init__(self, kind: type[nn.Module] = Block, number: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 6)
        self.layers = nn.ModuleList(kind() for _ in range(number))
        self.last = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.last(hidden)


def trained(kind: type[nn.Module] = Block, settings: Any = None, **arguments: Any) -> dict[str, Any]:
    """The weights after a run with evaluations, its losses, and how often the first block was computed."""
    model = Repeats(kind).double()
    calls: list[None] = []
    if not any("compile" in name for name in settings or {}):
        model.layers[0].drop.register_forward_pre_hook(lambda *_: calls.append(None))
    trainer = adamw_trainer(model, seed=1, **(settings or {}))
    trainer.train(DATA, 2, DATA, per_device_batch_size=4, sanity_check=False, **arguments)
    return {"weights": weights(trainer.get_model()), "history": trainer.run_history.to_dict(), "calls": len(calls)}


RUNS: dict[str, dict[str, Any]] = {
    "plain": {"kind": RandomBlock},
    "accumulation": {"kind": RandomBlock, "gradient_accumulation_steps": 3, "gradient_clip_norm": 0.1},
    "logical processes": {"settings": {"logical_processes": 3}},
    "bf16": {"settings": {"mixed_precision": "bf16"}},
    "compiled blocks": {"settings": {"compile_model": {"blocks": True, "backend": "aot_eager"}}},
}


@pytest.fixture(autouse=True)
def forget_other_models():
    """Reset torch's compiler, which compiles only a few models per process."""
    torch.compiler.reset()


@pytest.mark.parametrize(
    "run",
    [
        *(name for name in RUNS if name not in ("logical processes", "compiled blocks")),
        pytest.param("logical processes", marks=pytest.mark.extension("logical")),
        pytest.param("compiled blocks", marks=pytest.mark.thorough),
    ],
)
def test_checkpointed_activations_give_the_same_bits(run, no_accelerator):
    case = RUNS[run]
    kept = trained(**case)
    checkpointing = {"activation_checkpointing": True} | case.get("settings", {})
    found = trained(**case | {"settings": checkpointing})
    assert equal_weights(found["weights"], kept["weights"])
    assert found["history"] == kept["history"]
    if "compiled" not in run:
        assert found["calls"] > kept["calls"]  # they are computed again


def on_ranks(how: str) -> list[dict[str, torch.Tensor]]:
    """The weights with and without checkpointed activations; with SOAK also with compiled blocks."""
    torch.compiler.reset()
    results = []
    blocks = {"blocks": True, "backend": "aot_eager"}
    compiled = [{"activation_checkpointing": 0.5, "compile_model": blocks}] if SOAK else []
    for settings in ({}, {"activation_checkpointing": True}, *compiled):
        model = Repeats().double()
        accelerator = Accelerator(cpu=True)
        if how == "fsdp":
            for module in (*model.layers, model):
                fully_shard(module, mesh=mesh_of(world_size()))
        trainer = adamw_trainer(model, seed=1, accelerator=accelerator, **settings)
        trainer.train(DATA, 1, DATA, per_device_batch_size=4, gradient_accumulation_steps=2, sanity_check=False)
        results.append(full_state_dict(trainer.get_model().state_dict(), keep=True))
    return results


@pytest.mark.thorough
@pytest.mark.processes
@pytest.mark.soak
@pytest.mark.parametrize("how", [*["ddp"] * SOAK, pytest.param("fsdp", marks=CAN_SHARD)])
def test_several_processes_give_the_same_bits_with_it(how, two_ranks):
    for kept, checkpointed, *compiled in two_ranks.run(on_ranks, how):
        assert equal_weights(checkpointed, kept)
        assert all(equal_weights(each, kept) or largest_difference(each, kept) < 1e-12 for each in compiled)


@pytest.mark.extension("model_ema")
def test_copies_of_the_model_are_independent_of_it():
    from pytorch_accel_lite.callbacks import ModelEmaCallback

    averages = [ModelEmaCallback(0.5), ModelEmaCallback(0.5)]
    for average, checkpointing in zip(averages, (False, True), strict=True):
        trainer = adamw_trainer(Repeats().double(), seed=1, activation_checkpointing=checkpointing, callbacks=[average])
        trainer.train(DATA, 2, DATA)
    assert equal_weights(weights(averages[0].ema_model), weights(averages[1].ema_model))
    copied = copy.deepcopy(trainer.model)
    for parameter in copied.parameters():
        parameter.data.zero_()
    assert copied(DATA.tensors[0]).isnan().all()  # spectral norm divides by the norm
    assert trainer.model(DATA.tensors[0]).isfinite().all()


def stages(*widths: int) -> nn.Module:
    """A model whose stages differ in width, each with two blocks."""
    return nn.Sequential(
        nn.Linear(5, 6),
        nn.ModuleList(nn.Sequential(*(nn.Sequential(nn.Linear(w, w), nn.ReLU()) for _ in range(2))) for w in widths),
    )


@pytest.mark.parametrize(
    ("model", "chosen", "said"),
    [
        (Repeats(), True, "4 Block (layers.0 to layers.3)"),
        (Repeats(), 0.5, "2 Block (layers.1 to layers.3)"),
        (Repeats(), ["layers.0", "last"], "1 Block, 1 Linear (layers.0 to last)"),
        (Repeats(), "layers.*", "4 Block (layers.0 to layers.3)"),
        (Repeats(), ["Block"], "4 Block (layers.0 to layers.3)"),
        (Repeats(), Block, "4 Block (layers.0 to layers.3)"),
        (Repeats(), lambda name, module: name.endswith("2"), "1 Block (layers.2)"),
        (stages(6, 8), True, "4 Sequential (1.0.0 to 1.1.1)"),
    ],
)
def test_blocks_are_found_and_printed(model, chosen, said, capsys):
    names = list(model.state_dict())
    adamw_trainer(model, activation_checkpointing=chosen)
    assert f"Activation checkpointing: {said}" in capsys.readouterr().out
    assert list(model.state_dict()) == names


@pytest.mark.parametrize(
    ("model", "chosen", "message"),
    [
        (image_model(), True, r"activation_checkpointing: Sequential has no repeated blocks.*Name modules"),
        (Repeats(), 1.5, r"activation_checkpointing=1.5 must be a fraction .*at most 1"),
        (Repeats(), ["layer.0"], r"activation_checkpointing has 'layer.0', which is neither.*Did you mean 'layers.0'"),
        (Repeats(), ["layers"], r"includes 'layers', a ModuleList, which the model does not call.*'layers\.\*'"),
        (Repeats(), lambda *_: False, r"activation_checkpointing=.* chooses no module of Repeats"),
        (Repeats(), [], r"activation_checkpointing=\[\] chooses no module of Repeats"),
        (nn.Linear(1, 1), "layers", r"has 'layers', which is neither .* It has no modules in it"),
        (Repeats(), None, r"activation_checkpointing=None must be True, False, a fraction"),
        (Repeats(), 1, r"activation_checkpointing=1 must be True, False, a fraction"),
    ],
)
def test_invalid_choices_of_blocks_are_refused(model, chosen, message):
    with pytest.raises((ValueError, TypeError), match=message):
        adamw_trainer(model, activation_checkpointing=chosen)


@pytest.mark.parametrize(
    ("settings", "other"),
    [
        ({"compile_model": True}, "compile_model=True"),
        pytest.param({"compile_step": True}, "compile_step", marks=pytest.mark.extension("compiled_step")),
    ],
)
def test_a_larger_compiled_graph_is_refused(settings, other):
    trainer = adamw_trainer(Repeats().double(), activation_checkpointing=True, **settings)
    with pytest.raises(ValueError, match=f"activation_checkpointing does not work with {other}: .*='blocks'"):
        trainer.train(DATA, 1)


@pytest.mark.slow
def test_layers_of_transformers_append_to_no_cache_twice():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    tokens = torch.randint(32, (8, 6), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    results = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
        trainer = Trainer(
            model, None, torch.optim.SGD(model.parameters(), 0.1), [], activation_checkpointing=checkpointing
        )
        trainer.train(data, 1, per_device_batch_size=4, train_dataloader_kwargs={"shuffle": False})
        results.append(weights(model))
    assert equal_weights(*results)


def test_compiled_blocks_train_as_plain_ones_with_their_names(capsys):
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    results = []
    for options in (False, {"blocks": True, "backend": backend}):
        model = Blocks().double()
        trainer = adamw_trainer(model, compile_model=options, seed=1)
        trainer.train(DATA, 2, DATA, per_device_batch_size=13)
        results.append(weights(model))
    assert compiled
    assert equal_weights(*results)
    assert "Compiled one by one: 3 Sequential (blocks.0 to blocks.2)" in capsys.readouterr().out


class TooLarge(nn.Module):
    """A loss that does not fit into memory."""

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if type(outputs) is torch.Tensor:
            raise torch.OutOfMemoryError("out of memory")
        return (outputs - targets).square().mean()


@pytest.mark.extension("error_notes")
def test_an_out_of_memory_error_says_what_it_would_save():
    model = nn.Sequential(
        nn.Linear(5, 6), *(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)), nn.Linear(6, 1)
    )
    trainer = adamw_trainer(model.double(), TooLarge())
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer.train(DATA, 1, per_device_batch_size=20)
    # Each of three blocks keeps the result of tanh, of 20 samples with 6 numbers of 8 bytes, and not its input.
    extra = round(100 * 3 * 36 / (3 * (30 + 3 * 36 + 6)))
    said = (
        f"activation_checkpointing=True to the trainer: it would save 2.81 KiB of such a batch for about {extra} % more"
    )
    assert said in " ".join("".join(caught.value.__notes__).split())


@pytest.mark.thorough
@pytest.mark.extension("memory_estimate")
def test_the_memory_estimate_includes_checkpointing():
    def estimate(checkpointing: Any, **limit: Any) -> Any:
        trainer = adamw_trainer(Repeats(StatelessBlock), activation_checkpointing=checkpointing)
        data = torch.utils.data.TensorDataset(torch.randn(8, 512, 5), torch.randn(8, 512, 1))
        return trainer.estimate_memory(data, 8, device_type="cpu", **limit)

    kept, checkpointed = estimate(False, device_memory="200KiB"), estimate(True)
    assert checkpointed.parts["activations"] < kept.parts["activations"] / 2
    saved = format_bytes(kept.peak - checkpointed.peak)
    assert f"Trainer(activation_checkpointing=True) would save {saved} for about" in " ".join(repr(kept).split())
