"""Optimizers created by the trainer, once the model's parameters are final."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LinearLR, StepLR

from pytorch_accel_lite import Trainer, TrainerPlaceholderValues, callbacks
from pytorch_accel_lite.callbacks import EarlyStoppingCallback
from tests.launching import CAN_SHARD, only_with_soak
from tests.ranks import check_processes, every_state, final_weights, world_size
from tests.sharded import gathered, large_model, mesh_of, sharding_accelerator
from tests.small_models import (
    adamw_trainer,
    equal_weights,
    float64_data,
    float64_model,
    listener,
    two_optimizers,
    weights,
)

DATA = float64_data(26)


def train_with(make: Any, folder: Path | None = None, **kwargs: Any) -> Trainer:
    """Train with clipping, accumulation and a schedule; ``make`` gives the optimizer for a model."""
    model = float64_model()
    trainer = Trainer(model, nn.MSELoss(), make(model), callbacks=every_state(folder), seed=0)
    trainer.train(
        DATA,
        2,
        per_device_batch_size=4 // world_size(),
        gradient_accumulation_steps=2,
        gradient_clip_norm=0.5,
        create_scheduler_fn=partial(LinearLR, total_iters=TrainerPlaceholderValues.MAX_NUM_TRAIN_STEPS),
        **kwargs,
    )
    return trainer


def factory(model: nn.Module) -> Any:
    return partial(AdamW, lr=0.02)


def made(model: nn.Module) -> Any:
    return AdamW(model.parameters(), lr=0.02)


def _trained(model: nn.Module, make: Any, accelerator: Accelerator) -> dict[str, torch.Tensor]:
    trainer = Trainer(model, nn.MSELoss(), make(model), (), accelerator=accelerator, seed=3)
    trainer.evaluate(DATA, 3)
    for _ in range(2):
        trainer.train(DATA, 1, per_device_batch_size=3, gradient_clip_norm=1)
    parameters = [p for group in trainer.optimizer.param_groups for p in group["params"]]
    assert all(isinstance(parameter, DTensor) for parameter in parameters)
    assert set(parameters) == set(trainer.model.parameters())
    return gathered(trainer.get_model().state_dict())


HERE = {"per_device_batch_size": 4, "train_dataloader_kwargs": {"shuffle": False}}
SMALL = partial(AdamW, lr=0.02)


class Counted:
    """A factory that notes what it was called with."""

    def __init__(self, make: Any = SMALL) -> None:
        self.make = make
        self.given: list[Any] = []

    def __call__(self, parameters):
        self.given.append(list(parameters))
        return self.make(parameters)


# ------------------------------------------------------------------------------------------- as made before


def test_a_factorys_optimizer_trains_to_the_same_bits():
    assert equal_weights(weights(train_with(factory).model), weights(train_with(made).model))


def weights_of_made() -> dict[str, torch.Tensor]:
    return final_weights(train_with(made))


@only_with_soak
@pytest.mark.soak
def test_processes_train_as_one_and_resume_to_the_same_bits(two_ranks):
    results = check_processes(two_ranks, partial(train_with, factory))
    assert equal_weights(results[0][0], two_ranks(weights_of_made)[0])


def sharded_by_accelerate() -> Any:
    """Return what a model learns with each optimizer that is sharded when a run prepares it: first an evaluation."""
    accelerator = sharding_accelerator()
    return [_trained(large_model(), optimizer, accelerator) for optimizer in (factory, made)]


def sharded_by_the_user() -> Any:
    """The same of one that is sharded on the meta device, where all parameters look alike, and initialised then."""
    found = []
    for optimizer in (factory, made):
        values = [parameter.detach() for parameter in large_model().parameters()]
        with torch.device("meta"):
            model = large_model()
        for layer in (model[0], model[3], model):
            fully_shard(layer, mesh=mesh_of(2))
        model.to_empty(device="cpu")
        with torch.no_grad():
            for own, value in zip(model.parameters(), values, strict=True):
                own.copy_(distribute_tensor(value, own.device_mesh, own.placements))
        found.append(_trained(model, optimizer, Accelerator(cpu=True)))
    return found


@pytest.mark.thorough
@CAN_SHARD
@pytest.mark.processes
@pytest.mark.parametrize("case", [sharded_by_accelerate, sharded_by_the_user])
def test_a_sharded_model_is_sharded_first(two_ranks, case):
    for with_factory, with_optimizer in two_ranks(case):
        assert equal_weights(with_factory, with_optimizer)


def test_a_gradient_scaler_works_with_a_factorys_optimizer(scaled_accelerator):
    found = []
    for make in (lambda model: two_optimizers, two_optimizers):
        model = float64_model()
        names: list[Any] = []
        note = listener(on_train_epoch_end=lambda trainer, names=names: names.append(type(trainer.optimizer["rest"])))
        optimizer = make(model)
        trainer = adamw_trainer(model, optimizer=optimizer, callbacks=[note], accelerator=scaled_accelerator)
        trainer.train(DATA, 2, gradient_clip_norm=0.5, **HERE)
        found.append(weights(model))
        assert names == [AdamW] * 2
        assert trainer.optimizer["rest"] is trainer.optimizer.parts["rest"]
        assert len(trainer.optimizer.state) == 4
    assert equal_weights(*found)


# ------------------------------------------------------------------------------------------- when, and with what


def test_a_factory_is_called_once_when_training_first_begins():
    model, count = float64_model(), Counted()
    seen: list[int] = []
    callbacks = [listener(**{event: lambda trainer: seen.append(len(count.given)) for event in EVENTS})]
    trainer = adamw_trainer(model, optimizer=count, callbacks=callbacks)
    trainer.evaluate(DATA)
    trainer.predict(DATA)
    assert not count.given
    seen.clear()
    trainer.train(DATA, 1)
    first = trainer.optimizer
    trainer.train(DATA, 1)
    assert seen == [0, 1, 1, 1]
    assert isinstance(trainer.optimizer, AdamW)
    assert trainer.optimizer is first
    assert list(map(id, count.given[0])) == list(map(id, model.parameters()))


def test_a_factory_that_was_not_called_yet_says_so():
    trainer = adamw_trainer(float64_model(), optimizer=Counted())
    assert repr(trainer.optimizer) == "Counted(...) (not called yet)"
    assert "optimizer=Counted(...) (not called yet)" in repr(trainer)
    with pytest.raises(
        AttributeError, match=r"no 'param_groups' yet: optimizer=Counted\(...\) is called when train\(\)"
    ):
        print(trainer.optimizer.param_groups)
    trainer.train(DATA, 1)
    assert "optimizer=AdamW" in repr(trainer)


EVENTS = ["on_dataloaders_created", "on_training_run_start"]


def test_a_factory_gets_the_parameters_that_require_gradients():
    for freezes_in_callback in (False, True):
        model, count = float64_model(), Counted()
        freeze = partial(model[0].requires_grad_, False)
        callbacks = [listener(on_dataloaders_created=lambda trainer, freeze=freeze: freeze())]
        if not freezes_in_callback:
            freeze()
        adamw_trainer(model, optimizer=count, callbacks=callbacks[: int(freezes_in_callback)]).train(DATA, 1)
        assert list(map(id, count.given[0])) == list(map(id, model[2].parameters()))


def test_a_factory_may_take_named_parameters_or_the_model():
    given: list[Any] = []

    def by_name(named_parameters):
        given.append([name for name, _ in named_parameters])
        return SGD([p for _, p in named_parameters], lr=0.1)

    def of_model(model):
        given.append(model)
        return two_optimizers(model)

    for make in (by_name, of_model):
        model = float64_model()
        model[0].bias.requires_grad_(make is of_model)
        trainer = adamw_trainer(model, optimizer=make)
        trainer.train(DATA, 1)
    assert given == [["0.weight", "2.weight", "2.bias"], model]
    assert list(trainer.optimizer) == ["matrix", "rest"]


def test_an_optimizer_may_be_a_class_or_a_function_of_a_list():
    for make in (AdamW, lambda parameters: [SGD(parameters[:2], lr=0.1), SGD(parameters[2:], lr=0.1)]):
        model = float64_model()
        before = weights(model)
        adamw_trainer(model, optimizer=make).train(DATA, 1)
        assert not any(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_compiled_model_has_its_plain_names():
    given: list[Any] = []

    def by_name(named_parameters):
        given.extend(name for name, _ in named_parameters)
        return SGD([p for _, p in named_parameters], lr=0.1)

    model = float64_model()
    options = {"backend": "eager"}
    adamw_trainer(model, optimizer=by_name, compile_model=options).train(DATA, 1)
    adamw_trainer(torch.compile(float64_model(), **options), optimizer=by_name).train(DATA, 1)
    assert given == [name for name, _ in model.named_parameters()] * 2


# ------------------------------------------------------------------------------------------- what works with it


@pytest.mark.extension("monitoring")
def test_rates_are_recorded_and_watched_for_any_groups():
    def groups(parameters):
        return SGD([{"params": parameters[:1], "lr": 0.5}, {"params": parameters[1:]}], lr=0.1)

    watching = EarlyStoppingCallback(watch_metric="lr_1", greater_is_better=False, early_stopping_patience=5)
    rates = callbacks.LearningRateMonitorCallback()
    trainer = adamw_trainer(float64_model(), optimizer=groups, callbacks=[rates, watching])
    trainer.train(DATA, 2, DATA)
    assert trainer.run_history.get_metric_values("lr_0") == [0.5, 0.5]
    assert trainer.run_history.get_metric_values("lr_1") == [0.1, 0.1]


@pytest.mark.parametrize("tool", ["find_lr", "find_batch_size", "diagnose"])
@pytest.mark.extension("tuning")
def test_tools_create_the_optimizer_and_leave_it_unused(tool):
    model, count = float64_model(), Counted()
    trainer = adamw_trainer(model, optimizer=count)
    getattr(trainer, tool)(DATA)
    assert len(count.given) == 1
    assert not trainer.optimizer.state
    trainer.train(DATA, 1, **HERE)
    expected = float64_model()
    adamw_trainer(expected, optimizer=SMALL).train(DATA, 1, **HERE)
    assert equal_weights(weights(model), weights(expected))


@pytest.mark.parametrize("kind", ["checkpoint", "training_state"])
def test_a_state_loaded_before_training_is_the_new_optimizers(tmp_path, kind):
    saved = adamw_trainer(float64_model(), optimizer=SMALL)
    saved.train(DATA, 1, **HERE)
    getattr(saved, f"save_{kind}")(tmp_path / "saved")
    fresh = adamw_trainer(float64_model(1), optimizer=SMALL)
    getattr(fresh, f"load_{kind}")(tmp_path / "saved")
    getattr(fresh, f"save_{kind}")(tmp_path / "again")  # with the state of what is not made yet
    last = adamw_trainer(float64_model(2), optimizer=SMALL)
    getattr(last, f"load_{kind}")(tmp_path / "again")
    for trainer in (saved, fresh, last):
        trainer.train(DATA, 1, **HERE)
        assert equal_weights(weights(trainer.model), weights(saved.model))


def test_a_state_of_other_groups_is_refused_by_a_new_optimizer(tmp_path):
    saved = adamw_trainer(float64_model(), optimizer=lambda parameters: [SGD([p], lr=0.1) for p in parameters])
    saved.save_checkpoint(tmp_path / "fresh.pt")
    assert "optimizer_state_dict" not in torch.load(tmp_path / "fresh.pt")
    saved.train(DATA, 1)
    saved.save_checkpoint(tmp_path / "saved.pt")
    trainer = adamw_trainer(float64_model(), optimizer=AdamW)
    trainer.load_checkpoint(tmp_path / "saved.pt")
    with pytest.raises(ValueError, match="The state that was loaded does not fit what optimizer=Ada"):
        trainer.train(DATA, 1)


# ------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ({"a": AdamW}, r"optimizer\['a'\]=<class .*AdamW'> must be .* A function that creates several must return"),
        (nn.Linear(1, 1), r"optimizer=Linear\(.* must be an instance of torch.optim.Optimizer, several in a dict"),
    ],
)
def test_an_invalid_optimizer_argument_is_refused(optimizer, message):
    with pytest.raises(TypeError, match=message):
        adamw_trainer(float64_model(), optimizer=optimizer)


@pytest.mark.parametrize(
    ("make", "kwargs", "error", "message"),
    [
        (lambda parameters: 3, {}, TypeError, "optimizer=<lambda> returned 3. It must return a torch.optim.Opt"),
        (
            lambda parameters: [SGD(parameters[:1])],
            {},
            ValueError,
            r"None of the optimizers '0' has the model's 0\.bia",
        ),
        (
            SGD,
            {"create_scheduler_fn": {"a": StepLR}},
            ValueError,
            r"create_scheduler_fn\['a'\]: no optimizer has that name, only one without a name",
        ),
    ],
    ids=["no optimizer", "parameters missing", "unknown name"],
)
def test_the_result_of_a_factory_is_checked_before_training(make, kwargs, error, message):
    trainer = adamw_trainer(float64_model(), optimizer=make)
    with pytest.raises(error, match=message):
        trainer.train(DATA, 1, **kwargs)
    assert not trainer.is_running
    assert trainer.model is trainer.get_model()


def test_a_model_with_nothing_to_train_is_refused():
    trainer = adamw_trainer(float64_model().requires_grad_(False), optimizer=AdamW)
    with pytest.raises(ValueError, match="optimizer=AdamW: no parameter of Sequential requires a gradient"):
        trainer.train(DATA, 1)


@pytest.mark.parametrize("several", [False, True])
def test_optimizers_may_be_assigned_between_runs(several):
    model = float64_model()
    trainer = Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), callbacks=[])
    trainer.train(float64_data(8), 1)
    parts = {"body": torch.optim.SGD(model[0].parameters()), "head": torch.optim.SGD(model[2].parameters())}
    trainer.optimizer = parts if several else torch.optim.AdamW
    trainer.train(float64_data(8), 1)
    assert isinstance(
        trainer.optimizer["head"] if several else trainer.optimizer, torch.optim.SGD if several else torch.optim.AdamW
    )
