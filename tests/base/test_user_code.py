"""Telling what a user overrides from what this package has."""

from __future__ import annotations

import functools
from types import MethodType

import pytest
import torch

from pytorch_accel_lite import Trainer, TrainerCallback
from pytorch_accel_lite.base.user_code import is_overridden, overridden_methods
from pytorch_accel_lite.callbacks import LogMetricsCallback
from pytorch_accel_lite.trainer import TrainerWithTimmScheduler
from tests.small_models import make_trainer


@pytest.mark.parametrize("trainer_class", [Trainer, TrainerWithTimmScheduler, type("Own", (Trainer,), {})])
def test_a_plain_trainer_overrides_nothing(trainer_class):
    assert overridden_methods(make_trainer(trainer_class=trainer_class)) == set()


def test_attributes_and_new_methods_override_nothing():
    class Own(Trainer):
        saves_attributes = False
        my_value = 1
        clock = 2.0
        callbacks = property(lambda self: ())

        def my_step(self):
            pass

    trainer = make_trainer(trainer_class=Own)
    trainer.my_function = trainer.goodput = print
    trainer.train_step = None
    assert overridden_methods(trainer) == set()
    assert not is_overridden(trainer, "my_step")
    assert not is_overridden(trainer, "my_function")


@pytest.mark.parametrize(
    "value",
    [
        lambda self, batch: None,
        functools.wraps(Trainer.train_step)(lambda self, batch: None),
        functools.partialmethod(Trainer.train_step),
        property(lambda self: print),
        torch.no_grad()(lambda self, batch: None),
    ],
    ids=["function", "wrapper", "partial", "property", "decorated"],
)
def test_whatever_takes_the_place_of_a_method_overrides_it(value):
    trainer = make_trainer(trainer_class=type("Own", (Trainer,), {"train_step": value}))
    assert overridden_methods(trainer) == {"train_step"}


def test_a_method_from_a_mixin_overrides_that_of_the_trainer():
    mixin = type("Mixin", (), {"train_step": lambda self, batch: None})
    assert is_overridden(make_trainer(trainer_class=type("Own", (mixin, Trainer), {})), "train_step")


def test_a_method_that_is_put_back_overrides_nothing():
    trainer = make_trainer()
    original = trainer.train_step
    trainer.train_step = MethodType(lambda self, batch: None, trainer)
    assert overridden_methods(trainer) == {"train_step"}
    trainer.train_step = original
    assert overridden_methods(trainer) == set()


@pytest.mark.parametrize("value", [print, functools.partial(print, 1), torch.compile(Trainer.train_step)])
def test_any_callable_in_an_object_overrides_its_method(value):
    trainer = make_trainer()
    trainer.train_step = value
    assert overridden_methods(trainer) == {"train_step"}


def test_events_of_callbacks_are_overridden_in_the_same_ways():
    class Own(TrainerCallback):
        def on_train_step_end(self, trainer, **kwargs):
            pass

    callback = Own()
    callback.on_eval_step_end = print
    assert overridden_methods(callback) == {"on_train_step_end", "on_eval_step_end"}
    assert overridden_methods(LogMetricsCallback()) == set()
