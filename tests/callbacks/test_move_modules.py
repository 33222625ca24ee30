"""Modules that are attributes are on the device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.callbacks import MoveModulesToDeviceCallback
from tests.small_models import make_trainer


class OnMeta(Trainer):
    """A trainer on the meta device, to see what is moved to a device."""

    @property
    def device(self) -> torch.device:
        return torch.device("meta")


@pytest.mark.parametrize("event", ["on_training_run_start", "on_evaluation_run_start", "on_predict_run_start"])
def test_modules_that_are_attributes_are_moved_to_the_device(event):
    trainer = make_trainer([MoveModulesToDeviceCallback], trainer_class=OnMeta)
    trainer.metric = nn.Linear(2, 2)
    trainer.loss_func = nn.CrossEntropyLoss(weight=torch.ones(3))
    trainer.callback_handler.call_event(event, trainer)
    assert trainer.metric.weight.device.type == "meta"
    assert trainer.loss_func.weight.device.type == "meta"
    assert {p.device.type for p in trainer.model.parameters()} == {"cpu"}
