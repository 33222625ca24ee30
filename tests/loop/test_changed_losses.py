"""Losses changed by callbacks: used before the backward pass, an error after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accel_lite import Trainer, TrainerCallback, callbacks
from tests import ancestor
from tests.launching import CAN_SHARD
from tests.sharded import gathered, sharded_trainer
from tests.small_models import (
    equal_weights,
    float64_data,
    listener,
    make_data,
    make_model,
    make_trainer,
    train,
    weights,
)


def penalty(trainer: Trainer) -> torch.Tensor:
    return 0.1 * sum(p.square().sum() for p in trainer.get_model().parameters())


def replace(trainer: Trainer, batch_output: dict[str, Any], **kwargs: Any) -> None:
    batch_output["loss"] = batch_output["loss"] + penalty(trainer)


def change_in_place(trainer: Trainer, batch_output: dict[str, Any], **kwargs: Any) -> None:
    batch_output["loss"] += penalty(trainer)


class Penalised(Trainer):
    """Adds the penalty in its own step."""

    def calculate_train_batch_loss(self, batch):
        output = super().calculate_train_batch_loss(batch)
        return output | {"loss": output["loss"] + penalty(self)}


class Manual(Trainer):
    """Makes its own updates."""

    def train_step(self, batch):
        self.update(self.loss(batch))

    def loss(self, batch):
        return self.loss_func(self.model(batch[0]), batch[1])


class PenalisedManual(Manual):
    def loss(self, batch):
        return super().loss(batch) + penalty(self)


class OutOfMemory(nn.Module):
    """Takes at most one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > 1:
            raise MemoryError
        return self.inner(x)


def lbfgs(model: nn.Module) -> dict[str, Any]:
    return {"optimizer": torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)}


def logical(model: nn.Module) -> dict[str, Any]:
    return {"logical_processes": 2, "seed": 1}


def plain(model: nn.Module) -> dict[str, Any]:
    return {}


Steps = tuple[type[Trainer], type[Trainer], Callable[[], nn.Module], Callable[[nn.Module], dict[str, Any]], list[Any]]
#: Trainers without and with the penalty, their model, their arguments and callbacks.
STEPS: dict[str, Steps] = {
    "plain": (Trainer, Penalised, make_model, plain, []),
    "guarded": (Trainer, Penalised, make_model, plain, [lambda: callbacks.SkipFailedBatchesCallback()]),
    "manual": (Manual, PenalisedManual, make_model, plain, []),
    "replaying": (Trainer, Penalised, make_model, lbfgs, []),
    "logical": (Trainer, Penalised, make_model, logical, []),
}
OWNERS = {"guarded": ["failed_batches"], "logical": ["logical"], "manual": ["manual_optimization"]}
OWNERS["replaying"] = ["closures"]
each_kind = pytest.mark.parametrize(
    "kind", [pytest.param(name, marks=pytest.mark.extension(*OWNERS.get(name, ()))) for name in STEPS]
)


def trained(kind: str, adds: Any = None, penalised: bool = False, **arguments: Any) -> Trainer:
    base, penalised_class, create, settings, others = STEPS[kind]
    model = create()
    listed = [*(make() for make in others), *([] if adds is None else [listener(on_backward_start=adds)])]
    trainer = make_trainer(listed, model, penalised_class if penalised else base, **settings(model))
    return train(trainer, epochs=2, size=7, **arguments)


@pytest.mark.sampled
@pytest.mark.parametrize("adds", [replace, change_in_place])
@pytest.mark.parametrize("accumulation", [1, 3])
@each_kind
def test_a_loss_changed_before_the_backward_pass_is_trained_on(kind, accumulation, adds):
    found = trained(kind, adds, gradient_accumulation_steps=accumulation)
    by_step = trained(kind, penalised=True, gradient_accumulation_steps=accumulation)
    without = trained(kind, gradient_accumulation_steps=accumulation)
    assert equal_weights(weights(found.model), weights(by_step.model))
    assert not equal_weights(weights(found.model), weights(without.model))


@pytest.mark.sampled
@pytest.mark.parametrize("adds", [replace, change_in_place])
@each_kind
def test_the_recorded_loss_is_the_one_that_the_step_has_returned(kind, adds):
    recorded = trained(kind, adds).run_history["train_loss_epoch"]
    with_penalty = trained(kind, penalised=True).run_history["train_loss_epoch"]
    before_any_update = {"max_num_train_steps": 1}
    first = trained(kind, adds, **before_any_update).run_history["train_loss_epoch"]
    assert first == trained(kind, **before_any_update).run_history["train_loss_epoch"]
    assert recorded[0] < with_penalty[0]


@pytest.mark.slow
@pytest.mark.extension("compiled_step")
def test_a_loss_from_a_compiled_step_may_be_changed():
    trainers = [
        make_trainer([listener(on_backward_start=replace)], compile_step={"backend": "eager"}),
        make_trainer(trainer_class=Penalised),
    ]
    found, expected = (weights(train(trainer).model) for trainer in trainers)
    assert all(torch.allclose(found[name], value, atol=1e-6) for name, value in expected.items())


@pytest.mark.extension("failed_batches")
def test_a_split_batch_has_its_penalty_once():
    def run(adds: Any, trainer_class: type[Trainer]) -> Trainer:
        callbacks = [] if adds is None else [listener(on_backward_start=adds)]
        trainer = make_trainer(callbacks, OutOfMemory(), trainer_class)
        return train(trainer, epochs=2, size=7, auto_microbatch=True)

    found, by_step, whole = run(replace, Trainer), run(None, Penalised), trained("plain", replace)
    assert found.num_microbatches == 2
    assert equal_weights(weights(found.model), weights(by_step.model))
    parts = weights(found.model.inner)
    assert all(torch.allclose(parts[name], value, atol=1e-6) for name, value in weights(whole.model).items())


class Several(Trainer):
    factor = 1.0

    def calculate_train_batch_loss(self, batch):
        output = super().calculate_train_batch_loss(batch)
        return output | {"loss": {"fit": output["loss"], "size": self.factor * penalty(self)}}


class Less(Several):
    factor = 0.5


def halve(trainer: Trainer, batch_output: dict[str, Any], **kwargs: Any) -> None:
    batch_output["losses"]["size"] *= 0.5


def halve_another(trainer: Trainer, batch_output: dict[str, Any], **kwargs: Any) -> None:
    batch_output["losses"] = batch_output["losses"] | {"size": 0.5 * batch_output["losses"]["size"]}


def give_by_name(trainer: Trainer, batch_output: dict[str, Any], **kwargs: Any) -> None:
    losses = batch_output["losses"]
    batch_output["loss"] = {"fit": losses["fit"], "size": 0.5 * losses["size"]}


@pytest.mark.parametrize("adds", [halve, halve_another, give_by_name])
def test_single_named_losses_may_be_changed(adds):
    found = train(make_trainer([listener(on_backward_start=adds)], trainer_class=Several))
    assert equal_weights(weights(found.model), weights(train(make_trainer(trainer_class=Less)).model))
    first = {"max_num_train_steps": 1}
    found = train(make_trainer([listener(on_backward_start=adds)], trainer_class=Several), **first)
    assert found.run_history.to_dict() == train(make_trainer(trainer_class=Several), **first).run_history.to_dict()


def on_ranks(adds: bool) -> dict[str, torch.Tensor]:
    callbacks = [listener(on_backward_start=replace)] if adds else []
    trainer = make_trainer(callbacks, trainer_class=Trainer if adds else Penalised)
    train(trainer, epochs=2, size=7, gradient_accumulation_steps=2)
    return weights(trainer.model)


def sharded(adds: bool) -> dict[str, torch.Tensor]:
    callbacks = [listener(on_backward_start=replace)] if adds else []
    trainer = sharded_trainer("layers", callbacks, trainer_class=Trainer if adds else Penalised)
    trainer.train(float64_data(8), 1, per_device_batch_size=2, gradient_accumulation_steps=2)
    return gathered(trainer.model.state_dict())


def changed_on_ranks() -> list[dict[str, torch.Tensor]]:
    return [on_ranks(adds) for adds in (True, False)]


def changed_on_shards() -> list[dict[str, torch.Tensor]]:
    return [sharded(adds) for adds in (True, False)]


@pytest.mark.sampled
@pytest.mark.parametrize("case", [changed_on_ranks, pytest.param(changed_on_shards, marks=CAN_SHARD)])
def test_processes_train_on_changed_losses(two_ranks, case):
    (changed, by_step), (changed_too, _) = two_ranks(case)
    assert equal_weights(changed, by_step)
    assert equal_weights(changed, changed_too)


def test_the_penalty_does_not_depend_on_the_number_of_processes(two_ranks):
    alone = train(make_trainer([listener(on_backward_start=replace)]), epochs=2, size=7, batch_size=8)
    for found, _ in two_ranks(changed_on_ranks):
        assert all(torch.allclose(found[name], value, atol=1e-6) for name, value in weights(alone.model).items())


@pytest.mark.parametrize("value", [None, 1.0, torch.zeros(()), torch.zeros(2, requires_grad=True)])
def test_a_loss_that_cannot_be_trained_on_is_refused(value):
    def spoil(trainer: Trainer, batch_output: dict[str, Any], **kwargs: Any) -> None:
        batch_output["loss"] = value

    with pytest.raises(
        (TypeError, ValueError), match=r"on_backward_start: .*(must be a tensor|must have one|does not require)"
    ):
        train(make_trainer([listener(on_backward_start=spoil)]))


# ----------------------------------------------------------------------------------------- after the backward pass


@pytest.mark.parametrize("adds", [replace, change_in_place])
@pytest.mark.parametrize("event", ["on_train_step_end", "on_backward_end"])
@each_kind
def test_a_loss_changed_after_the_backward_pass_is_an_error(kind, event, adds):
    class Adds(TrainerCallback):
        pass

    setattr(Adds, event, lambda self, trainer, batch_output, **kwargs: adds(trainer, batch_output))
    _, _, create, settings, others = STEPS[kind]
    model = create()
    trainer = make_trainer([Adds(), *(make() for make in others)], model, STEPS[kind][0], **settings(model))
    if (adds, kind) == (change_in_place, "logical") or (event, kind) == ("on_backward_end", "guarded"):
        pytest.skip("its losses have no graph, or the batch is skipped")
    with pytest.raises(RuntimeError, match=rf"Adds\.{event} changes batch_output\['loss'\].*Change it in on_backward_"):
        train(trainer)


def test_a_callback_may_keep_the_loss_without_its_graph():
    def detach(trainer: Trainer, batch_output: dict[str, Any], **kwargs: Any) -> None:
        batch_output["loss"] = batch_output["loss"].detach()

    def read(trainer: Trainer, batch_output: dict[str, Any], **kwargs: Any) -> None:
        batch_output["loss"] = float(batch_output["loss"])

    found = train(make_trainer([listener(on_train_step_end=detach), listener(on_train_step_end=read)]))
    assert equal_weights(weights(found.model), weights(train(make_trainer()).model))


def test_a_penalty_trains_like_in_the_ancestor():
    ancestor.skip_without_it()
    from pytorch_accelerated.callbacks import TrainerCallback as TheirCallback
    from pytorch_accelerated.trainer import Trainer as TheirTrainer

    class Adds(TheirCallback):
        def on_train_step_end(self, trainer, batch_output, **kwargs):
            batch_output["loss"] = batch_output["loss"] + 0.1 * sum(
                p.square().sum() for p in trainer.model.parameters()
            )

    model = make_model()
    theirs = TheirTrainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), callbacks=[Adds])
    loader = {"shuffle": False, "num_workers": 0}
    theirs.train(make_data(), 2, per_device_batch_size=2, train_dataloader_kwargs=loader)
    ours = train(make_trainer([listener(on_backward_start=replace)]), epochs=2)
    assert equal_weights(weights(ours.model), weights(model))
    assert ours.run_history["train_loss_epoch"] == pytest.approx(
        theirs.run_history.get_metric_values("train_loss_epoch")
    )


def test_losses_that_a_callback_adds_do_not_replace_the_loss():
    def add_losses(trainer, batch_output, **kwargs):
        batch_output["losses"] = {"aux": next(trainer.model.parameters()).sum() * 0}

    adding, plain = make_model(), make_model()
    train(make_trainer([listener(on_backward_start=add_losses)], adding, seed=1))
    train(make_trainer(model=plain, seed=1))
    assert equal_weights(adding.state_dict(), plain.state_dict())
