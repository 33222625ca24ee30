"""Freezing, and learning rates by layer group."""

from __future__ import annotations

import copy
import functools
import importlib
import io
import pickle
from typing import Any

import pytest
import timm
import torch
from torch import nn

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.finetuning import Layer, LayerGroup, ModelFreezer, layer_group_parameters, stays_in_eval
from tests import ancestor
from tests.extensions.finetuning.groups_of_layers import model_to_unfreeze, trained
from tests.launching import only_with_soak, two_are_enough
from tests.ranks import IN_ORDER, global_batch
from tests.small_models import (
    adamw_trainer,
    equal_weights,
    float64_data,
    largest_difference,
    listener,
    make_trainer,
    train,
    weights,
)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4), nn.Tanh()), nn.Dropout(0.5))
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.body(x * self.scale))


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.BatchNorm1d(2)])
        self.named = nn.ModuleDict({"a": nn.Linear(2, 2)})
        self.head = nn.Linear(2, 1)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
        self.b.weight = self.a.weight


@functools.cache
def residual() -> nn.Module:
    with torch.device("meta"):  # whose parameters need not be drawn
        return timm.create_model("resnet18", pretrained=False)


MODELS = {
    "flat": lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 1)),
    "nested": Nested,
    "lists": Lists,
    "resnet": lambda: copy.deepcopy(residual()),
}
INDICES = [{}, {"from_index": 1, "to_index": 1}, {"from_index": 0, "to_index": -1}, {"to_index": 0}, {"from_index": -2}]


@pytest.fixture(scope="module")
def ancestor_finetuning() -> Any:
    ancestor.skip_without_it()
    return importlib.import_module("pytorch_accelerated.finetuning")


def frozen_and_unfrozen(freezer: Any, model: nn.Module, indices: dict[str, int]) -> list[Any]:
    """What is trained, the groups and the layers after freezing; then what is unfrozen, and trained again."""
    freezer.freeze(**indices)
    found: list[Any] = [set(trained(model)) - {"scale"}]
    for items in (freezer.get_layer_groups(), freezer.get_layers()):
        found.append([(item.layer_group_idx, type(item.module), item.is_frozen) for item in items])
    groups = freezer.unfreeze(-1, 1)
    found.append({number: sum(p.numel() for p in group["params"]) for number, group in groups.items()})
    return [*found, set(trained(model)) - {"scale"}]


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.parametrize("freeze_batch_norms", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_freezing_gives_what_the_ancestor_gives(ancestor_finetuning, name, freeze_batch_norms):
    """Except for parameters that the model itself owns, which the ancestor never freezes."""
    for indices in INDICES:
        ours, theirs = MODELS[name](), MODELS[name]()
        found = frozen_and_unfrozen(ModelFreezer(ours, freeze_batch_norms), ours, indices)
        freezer = ancestor_finetuning.ModelFreezer(theirs, freeze_batch_norms)
        assert found == frozen_and_unfrozen(freezer, theirs, indices), indices


def test_finetuning_has_the_types_and_defaults_of_the_ancestor():
    model = Nested()
    freezer = ModelFreezer(model)
    assert freezer.get_layer_groups() == [((0, -2), model.body, False), ((1, -1), model.head, False)]
    assert isinstance(freezer.get_layer_groups()[0], LayerGroup)
    assert isinstance(freezer.get_layers()[0], Layer)
    assert len(freezer.get_trainable_parameters()) == 7
    freezer.freeze()
    assert trained(model) == ["body.1.0.weight", "body.1.0.bias", "head.weight", "head.bias"]
    assert [group.is_frozen for group in freezer.get_layer_groups()] == [True, False]
    unfrozen = freezer.unfreeze()
    assert unfrozen.keys() == {0}
    assert unfrozen[0]["params"][0] is model.scale  # what the model itself owns goes with the first group
    assert len(trained(model)) == 7


def test_a_shared_parameter_is_in_the_first_group_that_has_it():
    model = Tied()
    ModelFreezer(model).freeze()
    assert trained(model) == ["b.bias"]
    assert [len(group["params"]) for group in layer_group_parameters(model, lr=1.0)] == [2, 1]
    model.own = model.a.weight  # the model's own attribute, too
    assert [len(group["params"]) for group in layer_group_parameters(model, lr=1.0)] == [2, 1]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda f: f.freeze(4), IndexError, "from_index=4 .* has 4, from 0 to 3 or from -4 to -1"),
        (lambda f: f.freeze("head"), TypeError, "from_index='head' must be the index of a layer group, see print"),
        (lambda f: f.freeze(to_index=None), TypeError, "to_index=None must be the index of a layer group"),
        (lambda f: ModelFreezer(f.model, "no"), TypeError, "freeze_batch_norms='no' must be True or False, not str"),
        (lambda f: f.unfreeze(to_index=-5), IndexError, "to_index=-5 is not a layer group"),
        (lambda f: ModelFreezer("m"), TypeError, "model='m' must be a torch.nn.Module"),
        (lambda f: ModelFreezer(nn.Linear(1, 1)).freeze(), ValueError, "Linear has no layer groups"),
        (lambda f: ModelFreezer(f.model, groups=2), TypeError, "groups=2 must be a list of modules"),
        (
            lambda f: layer_group_parameters(f.model.parameters(), 1),
            TypeError,
            "model=.* must be a torch.nn.Module, not generator",
        ),
        (lambda f: layer_group_parameters(f.model, lr=0), ValueError, "lr=0 must be greater than 0"),
        (lambda f: layer_group_parameters(f.model, 1, float("inf")), ValueError, "decay=inf must be greater than 0"),
        (lambda f: layer_group_parameters(f.model, lr=1, decay="x"), TypeError, "decay='x' must be a number"),
    ],
)
def test_freezing_refuses_unknown_groups_and_bad_rates(call, error, message):
    with pytest.raises(error, match=message):
        call(ModelFreezer(MODELS["flat"]()))


@pytest.mark.parametrize("copying", ["itself", "deepcopy", "saved"])
def test_frozen_modules_stay_in_evaluation_mode_while_training(copying):
    torch.manual_seed(0)
    model = Nested()
    ModelFreezer(model, freeze_batch_norms=True).freeze(set_modules_as_eval=True)
    if copying == "deepcopy":
        model = copy.deepcopy(model)
    elif copying == "saved":
        file = io.BytesIO()
        torch.save(model, file)
        model = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    before = weights(model)
    train(make_trainer(model=model), epochs=2)
    after = weights(model)
    assert equal_weights(
        {k: v for k, v in before.items() if "head" not in k}, {k: v for k, v in after.items() if "head" not in k}
    )
    assert not torch.equal(before["head.weight"], after["head.weight"])
    ModelFreezer(model, freeze_batch_norms=True).unfreeze()
    train(make_trainer(model=model))
    changed = {name for name, value in weights(model).items() if not torch.equal(after[name], value)}
    assert changed >= {"scale", "body.0.weight", "body.1.0.weight", "body.1.0.running_mean"}


def test_models_that_version_0_2_pickled_keep_their_modes():
    model = Nested()
    ModelFreezer(model).freeze(set_modules_as_eval=True)
    now, then = (b"pytorch_accel_lite.base.modules\nstay_in_eval\n", b"pytorch_accel_lite.finetuning\n_stay_in_eval\n")
    pickled = pickle.dumps(model, protocol=0)
    assert now in pickled
    loaded = pickle.loads(pickled.replace(now, then)).train()
    loaded(torch.ones(3, 4))
    assert not loaded.body[2].training
    ModelFreezer(loaded).unfreeze()
    assert not any(map(stays_in_eval, loaded.modules()))


@pytest.mark.extension("user_attributes")
@pytest.mark.parametrize("module", ["finetuning", "optimizers.freezing"])
def test_layer_groups_in_states_of_earlier_versions_are_found(module):
    model = Nested()
    trainer = make_trainer(model=model)
    trainer.group = ModelFreezer(model).get_layer_groups()[1]
    same = ("same",)  # as in the program
    node = ("named tuple", f"pytorch_accel_lite.{module}:LayerGroup", [("tuple", [1, -1]), same, True])
    saved = {"kept": {"": {"group": node}}}
    trainer.current_run.user_attributes.restore(trainer, saved, {}, "a state", is_final=True)
    assert type(trainer.group) is LayerGroup
    assert trainer.group == ((1, -1), model.head, True)


def test_batch_norms_of_frozen_groups_are_trained_by_default():
    model = Nested()
    ModelFreezer(model).freeze(set_modules_as_eval=True)
    before = weights(model)
    train(make_trainer(model=model))
    changed = {name for name, value in weights(model).items() if not torch.equal(before[name], value)}
    assert changed == {name for name in before if name.startswith(("body.1.0", "head"))}


def test_learning_rates_fall_with_the_distance_from_the_head():
    model = MODELS["flat"]()
    groups = layer_group_parameters(model, lr=0.8, decay=0.5)
    assert [group["lr"] for group in groups] == [0.2, 0.4, 0.8]  # the one without parameters does not count
    assert [id(p) for group in groups for p in group["params"]] == [id(p) for p in model.parameters()]
    torch.optim.AdamW(groups)
    assert layer_group_parameters(model, lr=1.0)[0]["lr"] == pytest.approx(1 / 2.6**2)


def unfrozen_by_hand() -> dict[int, dict[str, torch.Tensor]]:
    """Weights after each number of epochs, of which the second begins with the unfreezing."""

    def unfreeze(trainer: Trainer) -> None:
        if trainer.progress.epoch == 2:
            ModelFreezer(trainer.get_model()).unfreeze()
            trainer.rewrap_model()

    results = {}
    for epochs in (1, 2, 4):
        model = model_to_unfreeze()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        ModelFreezer(model).freeze()
        adamw_trainer(model, None, optimizer, callbacks=[listener(on_train_epoch_start=unfreeze)]).train(
            float64_data(37),
            epochs,
            float64_data(11),
            per_device_batch_size=global_batch(6),
            train_dataloader_kwargs=IN_ORDER,
            gradient_clip_norm=1.0,
        )
        results[epochs] = weights(model)
    return results


@only_with_soak
@two_are_enough
def test_several_processes_unfreeze_as_one(ranks):
    alone = unfrozen_by_hand()
    for result in ranks(unfrozen_by_hand):
        assert result.keys() == alone.keys()
        for epochs, expected in alone.items():
            assert equal_weights(result[epochs], ranks(unfrozen_by_hand)[0][epochs]), epochs
            assert largest_difference(result[epochs], expected) < 1e-10, epochs
