"""A warning of code that expects epochs to count from 0."""

from __future__ import annotations

from typing import Any

import pytest

from pytorch_accel_lite import Trainer, TrainerCallback
from tests.small_models import make_trainer, train


class FreezesFirst(TrainerCallback):
    """Expects the first epoch to have number 1."""

    def on_train_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
        if trainer.progress.epoch == 0:
            trainer.get_model().requires_grad_(False)

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        assert trainer.progress.epoch == 0


def test_comparing_the_epoch_with_0_is_warned_of_once():
    trainer = make_trainer([FreezesFirst])
    with pytest.warns(
        UserWarning, match=r"FreezesFirst\.on_train_epoch_start compares progress\.epoch with 0"
    ) as caught:
        train(trainer)
    assert len(caught) == 1
    train(trainer)
