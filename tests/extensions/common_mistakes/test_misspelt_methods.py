"""Methods of a trainer's subclass that are named almost like one to override, and that nothing calls, are warned of."""

from __future__ import annotations

import warnings

import pytest

from pytorch_accel_lite import Trainer
from tests.small_models import make_trainer, train

MISSPELT = {
    "calculate_training_batch_loss": "calculate_train_batch_loss",
    "calculate_val_batch_loss": "calculate_eval_batch_loss",
    "train_epoch_starts": "train_epoch_start",
    "create_schedulers": "create_scheduler",
}


def test_a_misspelt_method_is_warned_of_with_the_right_name():
    kind = type("Mine", (Trainer,), {name: lambda self, *args: None for name in [*MISSPELT, "train_on_images"]})
    with pytest.warns(UserWarning, match="is not a method of the trainer") as caught:
        train(make_trainer(trainer_class=kind))
    said = [str(warning.message) for warning in caught]
    assert len(said) == len(MISSPELT)
    for name, meant in MISSPELT.items():
        assert any(line.startswith(f"Mine.{name} ") and line.endswith(f"Did you mean {meant!r}?") for line in said)


class WithHelpers(Trainer):
    """Its helpers are named like methods to override, but it calls one and overrides the other's."""

    def calculate_train_batch_loss(self, batch):
        return self.calculate_train_batch_losses(batch)

    def calculate_train_batch_losses(self, batch):
        self.optimizer_step_size()
        return super().calculate_train_batch_loss(batch)

    def calculate_train_batch_loss_twice(self, batch):
        return 2 * self.calculate_train_batch_loss(batch)["loss"]

    def optimizer_step_size(self):
        return 1


def test_helpers_named_like_methods_are_not_warned_of():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(make_trainer(trainer_class=WithHelpers))
