"""Which parameters are trained: a resumed run has the changes of the run that saved the state."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from pytorch_accel_lite import Trainer, TrainerCallback
from pytorch_accel_lite.extension_tools.modules_and_devices import keep_in_eval, release_from_eval
from tests.launching import only_with_soak, two_are_enough
from tests.ranks import every_state, run_and_resume, shared_folder
from tests.small_models import float64_data, listener, same_bits

DATA = float64_data(24)


class Unfreezing(TrainerCallback):
    """Trains the last layer alone in the first epoch, and gives the others to the optimizer in the second."""

    def on_training_run_start(self, trainer, **kwargs):
        for layer in trainer.get_model()[:4]:
            layer.requires_grad_(False)
            keep_in_eval(layer)
        trainer.rewrap_model()

    def on_train_epoch_start(self, trainer, **kwargs):
        if trainer.progress.epoch == 2:
            for layer in trainer.get_model()[:4]:
                frozen = [parameter for parameter in layer.parameters() if not parameter.requires_grad]
                layer.requires_grad_(True)
                release_from_eval(layer)
                if frozen:
                    trainer.optimizer.add_param_group({"params": frozen, "lr": 0.01})
            trainer.rewrap_model()


def layered(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.2), nn.Linear(4, 1)).double()


def train_unfreezing(folder: Path, resume_from: Path | None = None) -> Trainer:
    model = layered(9 if resume_from else 0)
    optimizer = torch.optim.SGD(model[4].parameters(), lr=0.05, momentum=0.9)
    trainer = Trainer(model, nn.MSELoss(), optimizer, [Unfreezing(), *every_state(folder)], seed=0)
    trainer.train(DATA, 3, per_device_batch_size=4, resume_from=resume_from)
    return trainer


def weights_and_modes(trainer: Trainer) -> dict[str, Any]:
    trained = [parameter.requires_grad for parameter in trainer.get_model().parameters()]
    return {"trained": trained, **copy.deepcopy(trainer.get_model().state_dict())}


@pytest.mark.soak
def test_an_own_unfreezing_resumes_bit_for_bit():
    whole, *resumed = run_and_resume(train_unfreezing, weights_and_modes)
    assert len(resumed) >= 2
    assert all(same_bits(whole, run) for run in resumed)


@only_with_soak
@two_are_enough
def test_an_own_unfreezing_of_processes_resumes_bit_for_bit(ranks):
    for whole, *resumed in ranks.run(run_and_resume, train_unfreezing, weights_and_modes):
        assert len(resumed) >= 2
        assert all(same_bits(whole, run) for run in resumed)


class EverySecondUpdate(Trainer):
    """Updates the weights and clears the gradients after every second batch, as some loops do by hand."""

    def optimizer_step(self):
        if self.progress.update % 2:
            super().optimizer_step()

    def optimizer_zero_grad(self):
        if self.progress.update % 2 == 0:  # the step has been counted
            super().optimizer_zero_grad()


class OwnBackward(Trainer):
    """Does the same in a step of its own."""

    def train_step(self, batch):
        loss = self.loss_func(self.model(batch[0]), batch[1])
        self.accelerator.backward(loss)
        if self.progress.step % 2:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return {"loss": loss.detach()}


def train_every_second(kind: type[Trainer], folder: Path, resume_from: Path | None = None) -> Trainer:
    model = layered(9 if resume_from else 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    trainer = kind(model, nn.MSELoss(), optimizer, every_state(folder), seed=0)
    trainer.train(DATA, 1, per_device_batch_size=4, resume_from=resume_from)
    return trainer


def whole_and_resumed(kind: type[Trainer] = EverySecondUpdate) -> list[dict[str, Any]]:
    """The results of a run, and of one that resumes between two batches of the same update."""
    with shared_folder() as folder:
        whole = train_every_second(kind, folder / "whole")
        whole.accelerator.wait_for_everyone()
        resumed = train_every_second(kind, folder / "resumed", folder / "whole" / "update-000000001")
        return [weights_and_modes(whole), weights_and_modes(resumed)]


@pytest.mark.parametrize(
    "kind", [EverySecondUpdate, pytest.param(OwnBackward, marks=pytest.mark.extension("manual_optimization"))]
)
def test_gradients_left_for_a_later_update_are_resumed(kind):
    assert same_bits(*whole_and_resumed(kind))


def state_with_gradients(folder: Path) -> Path:
    train_every_second(EverySecondUpdate, folder)
    return folder / "update-000000001"


def test_gradients_left_are_resumed_in_another_type(tmp_path):
    model = layered(9).half()
    trainer = EverySecondUpdate(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.05), [])
    data = TensorDataset(*(tensor.half() for tensor in DATA.tensors))
    trainer.train(data, 1, per_device_batch_size=4, resume_from=state_with_gradients(tmp_path))
    assert trainer.progress.epochs_completed == 1


def test_gradients_left_do_not_train_what_the_program_freezes(tmp_path):
    model = layered(9)
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    seen: list[torch.Tensor] = []
    notes = listener(on_train_step_start=lambda trainer, **_: seen.append(model[0].weight.clone()))
    trainer = EverySecondUpdate(model, nn.MSELoss(), optimizer, [notes])
    trainer.train(DATA, 1, per_device_batch_size=4, resume_from=state_with_gradients(tmp_path))
    assert torch.equal(seen[0], model[0].weight)


@two_are_enough
def test_gradients_that_processes_leave_are_resumed(ranks):
    assert all(same_bits(*results) for results in ranks.run(whole_and_resumed))
