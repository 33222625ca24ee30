"""Steps whose output is no loss, or counts no items: the error says what to return."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pytorch_accel_lite import Trainer
from tests.refusals import returning
from tests.small_models import equal_weights, make_data, make_trainer, train, weights


def test_a_model_that_returns_no_loss_needs_a_loss_func():
    with pytest.raises(
        ValueError, match=r"loss_func is None and Sequential returned a tensor, not a loss\. Pass a loss_"
    ):
        train(make_trainer(loss_func=None))


def test_an_evaluation_loss_needs_no_gradient_but_is_checked():
    detached = make_trainer(trainer_class=returning(lambda output: output | {"loss": output["loss"].detach()}))
    assert detached.evaluate(make_data()).keys() == {"evaluation_loss"}
    for change, error, match in [
        (lambda output: None, TypeError, "calculate_eval_batch_loss must return a dict"),
        (lambda output: {}, ValueError, "calculate_eval_batch_loss must return a dict with 'loss'"),
        (lambda output: {"loss": output["loss"].new_empty(0)}, ValueError, r"calculate_eval_batch_loss.*\(0,\)"),
        (lambda output: {"loss": 1.0}, TypeError, r"calculate_eval_batch_loss.*must be a tensor"),
    ]:
        with pytest.raises(error, match=match):
            make_trainer(trainer_class=returning(change)).evaluate(make_data())


@pytest.mark.parametrize("size", [-2, np.int64(-2), np.float32(0.5)], ids=repr)
def test_a_batch_size_of_any_type_must_count_a_sample(size):
    with pytest.raises(ValueError, match=re.escape(f"returned batch_size={size!r}; it must be at least 1")):
        make_trainer(trainer_class=returning(lambda output: output | {"batch_size": size})).evaluate(make_data())


def test_an_evaluation_loss_of_samples_may_be_boolean():
    def wrong(output: dict[str, Any]) -> dict[str, Any]:
        return output | {"loss": {"first": output["loss"], "wrong": torch.tensor([True, False])}}

    found = make_trainer(trainer_class=returning(wrong)).evaluate(make_data(4), per_device_batch_size=2)
    assert found["evaluation_wrong"] == 0.5


def test_a_loss_named_like_the_sum_is_refused():
    losses = {"loss": torch.tensor(1.0), "aux": torch.tensor(3.0)}
    trainer = make_trainer(trainer_class=returning(lambda output: {"loss": losses}))
    with pytest.raises(ValueError, match=r"calculate_eval_batch_loss .* one called 'loss', like"):
        trainer.evaluate(make_data())


def test_batches_that_count_no_items_are_a_clear_error():
    class Counts(Trainer):
        items = 0

        def calculate_train_batch_loss(self, batch):
            return super().calculate_train_batch_loss(batch) | {"num_items_in_batch": torch.tensor(self.items)}

        calculate_eval_batch_loss = calculate_train_batch_loss

    trainer = make_trainer(trainer_class=Counts)
    with pytest.raises(ValueError, match=r"num_items_in_batch .* is 0 in every batch"):
        train(trainer)
    with pytest.raises(ValueError, match=r"num_items_in_batch .* is 0 in every batch"):
        trainer.evaluate(make_data())
    trainer.items = 1
    assert trainer.evaluate(make_data()).keys() == {"evaluation_loss"}


class OwnTraining(Trainer):
    """Computes its own loss, in training only."""

    def calculate_train_batch_loss(self, batch):
        return {"loss": (self.model(batch[0]) - batch[1]).square().mean()}


class OwnTrainStep(OwnTraining):
    def train_step(self, batch):
        self.update(self.calculate_train_batch_loss(batch)["loss"])


@pytest.mark.parametrize(
    "trainer_class", [OwnTraining, pytest.param(OwnTrainStep, marks=pytest.mark.extension("manual_optimization"))]
)
def test_a_training_loss_without_one_to_evaluate_is_refused(trainer_class):
    trainer = make_trainer(trainer_class=trainer_class, loss_func=None)
    with pytest.raises(ValueError, match=r"a tensor, not a loss.*override .*calculate_eval_batch_loss"):
        train(trainer, eval_dataset=True)
    train(trainer)


def test_a_model_with_its_own_loss_may_train_on_another():
    class Model(nn.Linear):
        def forward(self, x, labels=None):
            outputs = super().forward(x)
            return {"outputs": outputs, "loss": None if labels is None else (outputs - labels).square().mean()}

    class Smooth(Trainer):
        def calculate_train_batch_loss(self, batch):
            return {"loss": self.model(**batch)["loss"] / 2}

    x, y = make_data(6).tensors

    def run(trainer_class):
        torch.manual_seed(0)
        model = Model(4, 1)
        trainer = make_trainer(model=model, trainer_class=trainer_class, loss_func=None)
        data = [{"x": a, "labels": b} for a, b in zip(x, y, strict=True)]
        train(trainer, train_dataset=data, eval_dataset=data)
        return trainer.run_history.get_latest_metric("train_loss_epoch")

    assert run(Smooth) < run(Trainer)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_count_of_items_may_have_one_element(accumulation):
    def trained(count: object) -> dict[str, Any]:
        class Counts(Trainer):
            def calculate_train_batch_loss(self, batch):
                return super().calculate_train_batch_loss(batch) | {"num_items_in_batch": count}

        return weights(train(make_trainer(trainer_class=Counts), gradient_accumulation_steps=accumulation).model)

    assert equal_weights(trained(torch.tensor([3])), trained(torch.tensor(3)))


@pytest.mark.parametrize("counted", [0, 1])
@pytest.mark.parametrize(
    "settings", [{}, pytest.param({"logical_processes": 2, "seed": 1}, marks=pytest.mark.extension("logical"))]
)
def test_items_are_returned_for_every_batch_or_for_none(counted, settings):
    class CountsSome(Trainer):
        def calculate_train_batch_loss(self, batch):
            output = super().calculate_train_batch_loss(batch)
            return output | {"num_items_in_batch": 100} if self.progress.step == counted else output

    with pytest.raises(ValueError, match=r"num_items_in_batch was returned for .*return it for every batch, or for"):
        train(make_trainer(trainer_class=CountsSome, **settings), gradient_accumulation_steps=2)


class ReturnsOneDict(Trainer):
    """Returns one dict in each step, with losses by name in some."""

    def __init__(self, *args: Any, copies: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.output: dict[str, Any] = {}
        self.copies = copies

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        loss = self.loss_func(self.model(batch[0]), batch[1])
        self.output["loss"] = {"a": loss, "b": 2 * loss} if self.progress.step == 0 else loss
        return dict(self.output) if self.copies else self.output

    def calculate_eval_batch_loss(self, batch: Any) -> dict[str, Any]:
        self.output["loss"] = self.loss_func(self.model(batch[0]), batch[1])
        return dict(self.output) if self.copies else self.output


def test_a_step_may_return_the_same_dict_each_time():
    histories = []
    for copies in (False, True):
        trainer = make_trainer(trainer_class=partial(ReturnsOneDict, copies=copies))
        train(trainer, 2, train_dataset=make_data(7), eval_dataset=make_data(5), batch_size=3)
        histories.append(trainer.run_history.to_dict())
    assert histories[0] == histories[1]


def test_an_entry_called_losses_must_be_losses_by_name():
    class OfSamples(Trainer):
        def calculate_train_batch_loss(self, batch):
            losses = (self.model(batch[0]) - batch[1]).square()
            return {"loss": losses.mean(), "losses": losses.detach().flatten()}

    with pytest.raises(TypeError, match="calculate_train_batch_loss returned Tensor as 'losses', the entry"):
        train(make_trainer(trainer_class=OfSamples))
