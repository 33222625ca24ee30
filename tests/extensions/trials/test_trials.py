"""Trials train, and leave no trace. ``tuning``, ``checking`` and ``memory_estimate`` have further tests of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pytorch_accel_lite import StopTrainingError, Trainer, TrainerCallback
from pytorch_accel_lite.extending import RunRequest
from pytorch_accel_lite.extensions.trials import Trial, UserCallbacks
from tests.small_models import (
    equal_weights,
    float64_data,
    float64_model,
    make_data,
    make_trainer,
    same_bits,
    train,
    weights,
)


class Notes(TrainerCallback):
    """Notes the number of samples of each step, and may fail."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.sizes = error, list[int]()

    def on_train_step_end(self, trainer: Trainer, batch: Any, **kwargs: Any) -> None:
        self.sizes.append(len(batch[0]))
        if self.error is not None:
            raise self.error

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        raise AssertionError("no run starts")


def trial_of(trainer: Trainer, **options: Any) -> Trial:
    return Trial(trainer, "try_it", make_data(), 2, RunRequest(num_epochs=1, gradient_accumulation_steps=2), **options)


def test_a_trial_trains_and_restores_everything():
    trainer = make_trainer()
    before, generator = weights(trainer.model), torch.get_rng_state()
    with (trial := trial_of(trainer)).running():
        losses = trial.update(trial.batches())
        assert losses.keys() == {"loss"}
        assert not equal_weights(weights(trainer.get_model()), before)
    assert equal_weights(weights(trainer.model), before)
    assert torch.equal(torch.get_rng_state(), generator)
    assert not trainer.is_running
    assert trainer.progress.update == 0


class Counts(torch.nn.Module):
    """A loss function that changes attributes of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.latest = 0, torch.zeros(3)

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = (outputs - targets).square().mean()
        self.latest[self.calls % 3] = loss.detach()
        self.calls += 1
        return loss


class Totals(Trainer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.total, self.parts = np.zeros(1), {"loss": torch.zeros(())}

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        output = super().calculate_train_batch_loss(batch)
        self.total += 1
        self.parts["loss"] += output["loss"].detach()
        return output


def test_a_trial_restores_attributes_that_steps_change():
    model = float64_model()
    trainer = Totals(model, Counts(), torch.optim.SGD(model.parameters(), lr=0.1), callbacks=[])
    trainer.find_lr(float64_data())
    assert trainer.loss_func.calls == trainer.total.sum() == trainer.parts["loss"] == 0
    assert not trainer.loss_func.latest.any()


def test_what_a_trial_keeps_is_restored_within_it():
    with (trial := trial_of(make_trainer())).running():
        before, batch = weights(trial.trainer.get_model()), trial.read_batch(2)
        with trial.keeping_training():
            trial.update(trial.batches())
        assert equal_weights(weights(trial.trainer.get_model()), before)
        with trial.evaluating():
            assert trial.output_of(batch, evaluation=True, with_gradients=False)["batch_size"] == 2


def test_a_run_after_a_trial_has_the_same_bits():
    def trained(tries: bool) -> Any:
        trainer = make_trainer(seed=1)
        if tries:
            with (trial := trial_of(trainer)).running():
                trial.update(trial.batches())
        return weights(train(trainer, train_dataloader_kwargs=None).model)

    assert same_bits(trained(True), trained(False))


def test_a_trial_says_which_steps_it_supports():
    class Own(Trainer):
        def train_step(self, batch: Any) -> Any:
            return None

    with pytest.raises(TypeError, match=r"try_it\(\) makes steps with one loss and one update, unlike Own.train_step"):
        trial_of(make_trainer(trainer_class=Own))
    trial_of(make_trainer(trainer_class=Own), supports=("train_step",))
    trainer = make_trainer()
    trainer.train_step = lambda batch: None
    with pytest.raises(TypeError, match=r"try_it\(\) makes steps with one loss and one update"):
        trial_of(trainer)


def test_callbacks_are_called_until_they_fail():
    right, wrong, stops = Notes(), Notes(ValueError("no run")), Notes(StopTrainingError("enough"))
    handler = UserCallbacks([right, wrong, stops, TrainerCallback()])
    with (trial := trial_of(make_trainer())).running(), trial.epoch(handler):
        for _ in range(3):
            trial.run_step(trial.read_batch(2))
    assert [callback.sizes for callback in (right, wrong, stops)] == [[2, 2, 2], [2], [2, 2, 2]]
    assert handler.failures == {"Notes": "ValueError: no run"}
    assert handler.seconds["Notes"] > 0


@pytest.mark.parametrize("tool", ["check", "diagnose", "estimate_memory", "find_batch_size", "find_lr"])
def test_tools_accept_integers_of_numpy(tool):
    argument = "start" if tool == "find_batch_size" else "per_device_batch_size"
    steps = {"num_steps": 10} if tool in ("diagnose", "find_lr") else {}
    getattr(make_trainer(), tool)(make_data(), **{argument: np.int64(2)}, **steps)
