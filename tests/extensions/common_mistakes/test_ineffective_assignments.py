"""Warnings about arguments that a program has assigned to the trainer, where they have no effect."""

from __future__ import annotations

import warnings

import pytest

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.callbacks import EarlyStoppingCallback
from tests.small_models import make_trainer, train


def test_callbacks_that_are_assigned_are_named():
    trainer = make_trainer()
    trainer.callbacks = [*trainer.callbacks, EarlyStoppingCallback()]
    with pytest.warns(UserWarning, match=r"EarlyStoppingCallback will not be called. Add .*add_callback\(...\)"):
        train(trainer, eval_dataset=True)


@pytest.mark.parametrize(
    ("name", "instead"),
    [("metrics", "Trainer"), ("mixed_precision", "Trainer"), ("num_epochs", "train"), ("gradient_clip_norm", "train")],
)
def test_arguments_that_are_assigned_are_named(name, instead):
    trainer = make_trainer()
    setattr(trainer, name, 1)
    with pytest.warns(UserWarning, match=rf"^trainer.{name} = ... has no effect. Pass {instead}\({name}=...\)"):
        train(trainer)


def test_what_has_an_effect_is_not_warned_of():
    class Own(Trainer):
        def create_scheduler(self):
            self.metrics, self.num_epochs, self.callbacks = ["mine"], 7, self.callback_handler.callbacks
            return super().create_scheduler()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(make_trainer(trainer_class=Own))
        trainer = make_trainer()
        trainer.seed, trainer.channels_last, trainer.notes = 3, False, "mine"
        train(trainer, create_scheduler_fn="cosine")
