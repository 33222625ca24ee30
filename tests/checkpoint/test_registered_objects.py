"""Objects of the user's own in training states: those registered with the trainer or with the accelerator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import Accelerator

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from tests.small_models import adamw_trainer, equal_weights, float64_data, float64_model, listener, make_trainer, train


class Counter:
    """An object with a state."""

    value = 0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def test_objects_registered_with_the_accelerator_are_kept(tmp_path):
    def run(epochs: int) -> tuple[int, int]:
        accelerator, first, second = Accelerator(cpu=True), Counter(), Counter()
        trainer = make_trainer([SaveTrainingStateCallback(tmp_path), counts], accelerator=accelerator)
        accelerator.register_for_checkpointing(trainer.model, first, second)
        trainer.register_for_checkpointing("second", second)
        train(trainer, epochs, resume_from="latest")
        return first.value, second.value

    def count(trainer: Trainer, step: int, **kwargs: Any) -> None:
        trainer.accelerator._custom_objects[1].value += 1
        trainer.registered_objects["second"].value += 10

    counts = listener(on_train_step_end=count)
    assert run(1) == (3, 30)
    shared = torch.load(next(tmp_path.glob("update-*/trainer.pt")))
    assert shared["objects"] == {"second": {"value": 30}, "accelerator.Counter.1": {"value": 3}}
    assert run(2) == (6, 60)


def trainer_with(**objects: Any) -> Trainer:
    trainer = adamw_trainer(float64_model())
    for name, registered in objects.items():
        trainer.register_for_checkpointing(name, registered)
    return trainer


def test_a_registered_object_is_restored_with_the_trainer(tmp_path):
    counter, again = Counter(), Counter()
    counter.value = 3
    trainer, fresh = trainer_with(counter=counter), trainer_with(counter=again)
    trainer.train(float64_data(8), 1)
    trainer.save_training_state(tmp_path / "state", {"note": "kept"})
    metadata = fresh.load_training_state(tmp_path / "state")
    assert metadata["note"] == "kept"
    assert metadata["progress"]["update"] == 1
    assert again.value == 3
    assert equal_weights(fresh.model.state_dict(), trainer.model.state_dict())


def test_objects_of_the_state_or_the_run_alone_are_warned_of(tmp_path):
    trainer_with(counter=Counter()).save_training_state(tmp_path / "state")
    with (
        pytest.warns(UserWarning, match="holds nothing for the registered object 'other'"),
        pytest.warns(UserWarning, match="state of registered object 'counter', which no longer exists"),
    ):
        trainer_with(other=Counter()).load_training_state(tmp_path / "state")


def test_an_object_is_registered_once_and_has_a_state():
    counter = Counter()
    trainer = trainer_with(counter=counter)
    with pytest.raises(ValueError, match="already registered as 'counter'"):
        trainer.register_for_checkpointing("counter", counter)
    with pytest.raises(TypeError, match=r"must have state_dict\(\)"):
        trainer.register_for_checkpointing("other", object())
