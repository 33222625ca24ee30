"""Freezing, learning rates by layer group, and gradual unfreezing."""

from __future__ import annotations

import copy
import functools
import importlib
import io
import shutil
from functools import partial
from typing import Any

import pytest
import timm
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR
from torch.utils.data import TensorDataset

from pytorch_accel_lite import Trainer, TrainerCallback
from pytorch_accel_lite.callbacks import GradualUnfreezingCallback, SaveTrainingStateCallback
from pytorch_accel_lite.finetuning import Layer, LayerGroup, ModelFreezer, layer_group_parameters
from tests import ancestor as ancestors
from tests.launching import some_of, two_are_enough
from tests.ranks import IN_ORDER, global_batch
from tests.tasks import (
    equal,
    largest_difference,
    listener,
    make_data,
    make_model,
    make_trainer,
    quiet_trainer,
    regression_data,
    train,
    weights,
)


def model_to_unfreeze() -> nn.Module:
    state = torch.get_rng_state()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(5, 6), nn.Tanh()), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))
    torch.set_rng_state(state)
    return model.double()


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


def trained(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


@pytest.fixture(scope="module")
def ancestor() -> Any:
    ancestors.skip_without_it()
    return importlib.import_module("pytorch_accelerated.finetuning")


@pytest.mark.slow
@pytest.mark.parametrize("freeze_batch_norms", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_freezing_gives_what_the_ancestor_gives(ancestor, name, freeze_batch_norms):
    """Except for parameters that the model itself owns, which the ancestor never freezes."""
    for indices in INDICES:
        ours, theirs = MODELS[name](), MODELS[name]()
        freezers = [c(m, freeze_batch_norms) for c, m in ((ModelFreezer, ours), (ancestor.ModelFreezer, theirs))]
        for freezer in freezers:
            freezer.freeze(**indices)
        assert [n for n in trained(ours) if n != "scale"] == [n for n in trained(theirs) if n != "scale"]
        for method in ("get_layer_groups", "get_layers"):
            found, expected = (
                [(item.layer_group_idx, type(item.module), item.is_frozen) for item in getattr(freezer, method)()]
                for freezer in freezers
            )
            assert found == expected, method
        found, expected = (freezer.unfreeze(-1, 1) for freezer in freezers)
        assert {i: sum(p.numel() for p in group["params"]) for i, group in found.items()} == {
            i: sum(p.numel() for p in group["params"]) for i, group in expected.items()
        }
        assert [n for n in trained(ours) if n != "scale"] == [n for n in trained(theirs) if n != "scale"]


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
        (lambda f: f.unfreeze(to_index=-5), IndexError, "to_index=-5 is not a layer group"),
        (lambda f: ModelFreezer("m"), TypeError, "model='m' must be a torch.nn.Module"),
        (lambda f: ModelFreezer(nn.Linear(1, 1)).freeze(), ValueError, "Linear has no layer groups"),
        (lambda f: layer_group_parameters(f.model, lr=0), ValueError, "lr=0 must be greater than 0"),
        (lambda f: layer_group_parameters(f.model, lr=1, decay="x"), TypeError, "decay='x' must be a number"),
        (lambda f: GradualUnfreezingCallback(0), ValueError, "every_n_epochs=0 must be at least 1"),
        (lambda f: GradualUnfreezingCallback(lr_decay=-1), ValueError, "lr_decay=-1 must be greater than 0"),
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
    assert equal(
        {k: v for k, v in before.items() if "head" not in k}, {k: v for k, v in after.items() if "head" not in k}
    )
    assert not torch.equal(before["head.weight"], after["head.weight"])
    ModelFreezer(model, freeze_batch_norms=True).unfreeze()
    train(make_trainer(model=model))
    changed = {name for name, value in weights(model).items() if not torch.equal(after[name], value)}
    assert changed >= {"scale", "body.0.weight", "body.1.0.weight", "body.1.0.running_mean"}


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


def three_groups() -> nn.Module:
    model = make_model()
    return nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), model[0], model[1], model[2])


def log_of(model: nn.Module) -> tuple[list[Any], TrainerCallback]:
    """What is trained in each epoch, and what has changed in it, by the number of the layer group."""
    log: list[Any] = []
    before: dict[str, torch.Tensor] = {}

    def start(trainer):
        before.update(weights(model))

    def end(trainer):
        changed = {name[0] for name, value in weights(model).items() if not torch.equal(before[name], value)}
        log.append("".join(sorted(changed)))

    return log, listener(on_train_epoch_start=start, on_train_epoch_end=end)


@pytest.mark.parametrize(("every", "expected"), [(1, ["3", "13", "013", "013"]), (2, ["3", "3", "13", "13", "013"])])
@pytest.mark.parametrize("over", ["head", "all"])
def test_one_more_group_is_trained_every_n_epochs(every, expected, over):
    model = three_groups()
    log, logging = log_of(model)
    optimizer = torch.optim.AdamW((model[-1] if over == "head" else model).parameters(), lr=0.1, weight_decay=0.1)
    trainer = make_trainer([GradualUnfreezingCallback(every, lr_decay=0.5), logging], model, optimizer=optimizer)
    train(trainer, len(expected), eval_dataset=True)
    assert log == expected
    groups = trainer.optimizer.param_groups
    assert [group["lr"] for group in groups] == ([0.1, 0.05, 0.025] if over == "head" else [0.1])
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    train(trainer, 2)  # a second run starts with the head again, and adds nothing
    assert log == [*expected, *expected[:2]]
    assert len(groups) == (3 if over == "head" else 1)


def test_an_evaluation_freezes_nothing():
    model = three_groups()
    log, logging = log_of(model)
    evaluating = listener(on_train_epoch_end=lambda trainer: trainer.evaluate(make_data()))
    trainer = make_trainer([GradualUnfreezingCallback(), evaluating, logging], model)
    evaluated = listener(on_train_step_end=lambda trainer, step, **kw: step or trainer.evaluate(make_data()))
    trainer.callback_handler.add_callback(evaluated)
    train(trainer, 3)
    assert log == ["3", "13", "013"]
    trainer.evaluate(make_data())
    assert len(trained(model)) == len(list(model.parameters()))


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        (partial(LambdaLR, lr_lambda=lambda update: 1 / (1 + update)), [0.1 / 10, 0.05 / 10, 0.025 / 10]),
        (partial(CosineAnnealingLR, T_max=9), [0, 0, 0]),
        (partial(OneCycleLR, max_lr=[0.4, 0.2, 0.1], total_steps=10, final_div_factor=1), [0.016, 0.008, 0.004]),
    ],
)
def test_schedulers_know_all_groups(scheduler, expected):
    model = three_groups()
    optimizer = torch.optim.SGD(model[-1].parameters(), lr=0.1)
    trainer = make_trainer([GradualUnfreezingCallback(lr_decay=0.5)], model, optimizer=optimizer)
    train(trainer, 3, create_scheduler_fn=scheduler)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(expected, abs=1e-12)
    assert len(trainer.scheduler.get_last_lr()) == 3


def test_an_optimizer_without_the_head_is_an_error():
    model = three_groups()
    trainer = make_trainer([GradualUnfreezingCallback], model, optimizer=torch.optim.SGD(model[0].parameters(), lr=0.1))
    with pytest.raises(ValueError, match="the optimizer has none of its parameters"):
        train(trainer)


def unfreezing_run(folder, resume_from=None, extra=()) -> Trainer:
    model = model_to_unfreeze()
    optimizer = torch.optim.AdamW(model[-1].parameters(), lr=0.01)
    saving = SaveTrainingStateCallback(folder, save_every_n_steps=1)
    trainer = Trainer(model, nn.MSELoss(), optimizer, callbacks=[GradualUnfreezingCallback(), saving, *extra], seed=3)
    x = torch.randn(10, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    scheduler = partial(LambdaLR, lr_lambda=lambda update: 1 / (1 + update))
    trainer.train(data, 4, per_device_batch_size=4, create_scheduler_fn=scheduler, resume_from=resume_from)
    return trainer


@pytest.mark.soak
@pytest.mark.slow
def test_from_every_state_a_run_resumes_to_the_same_bits(tmp_path):
    whole = unfreezing_run(tmp_path / "whole")
    states = sorted((tmp_path / "whole").glob("update-*"))
    assert len(states) == 12
    for state in some_of(states):
        resumed = unfreezing_run(tmp_path / "again", resume_from=state)
        assert equal(weights(resumed.model), weights(whole.model)), state.name
        first, second = resumed.optimizer.state_dict(), whole.optimizer.state_dict()
        assert first["param_groups"] == second["param_groups"]
        assert first["state"].keys() == second["state"].keys()
        shutil.rmtree(tmp_path / "again")


def gradual_unfreezing() -> Any:
    """Weights after each number of epochs, for an optimizer over the head; also by hand with rewrap_model()."""
    results = {}

    class UnfreezesByHand(TrainerCallback):
        def on_train_epoch_start(self, trainer, **kwargs):
            if trainer.progress.epoch == 2:
                ModelFreezer(trainer.get_model()).unfreeze()
                trainer.rewrap_model()

    for how in ("callback", "accumulation", "by hand"):
        for epochs in (1, 2, 4):
            model = model_to_unfreeze()
            optimizer = torch.optim.AdamW((model if how == "by hand" else model[-1]).parameters(), lr=0.01)
            if how == "by hand":
                ModelFreezer(model).freeze()
            callbacks = [UnfreezesByHand() if how == "by hand" else GradualUnfreezingCallback()]
            quiet_trainer(model, None, optimizer, callbacks=callbacks).train(
                regression_data(37),
                epochs,
                regression_data(11),
                per_device_batch_size=global_batch(6),
                gradient_accumulation_steps=2 if how == "accumulation" else 1,
                train_dataloader_kwargs=IN_ORDER,
                gradient_clip_norm=1.0,
            )
            results[how, epochs] = weights(model)
    return results


@two_are_enough
def test_several_processes_unfreeze_as_one(ranks):
    alone = gradual_unfreezing()
    for result in ranks(gradual_unfreezing):
        assert result.keys() == alone.keys()
        for key, expected in alone.items():
            assert equal(result[key], ranks(gradual_unfreezing)[0][key]), key
            assert largest_difference(result[key], expected) < 1e-10, key
