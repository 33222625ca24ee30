"""States of optimizers of others than torch are loaded with the types that they were saved with."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from pytorch_accel_lite.loop.snapshot import Snapshot
from tests.small_models import make_trainer, same_bits, train


class Exact(Optimizer):
    """Keeps its weights in float32, and further values of other types than the parameter's."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            exact = parameter.detach().float() + 0.01
            lists = [exact * 2, (3, "name")]
            self.state[parameter] = {"exact": exact, "seen": exact > 0, "kind": "matrix", "lists": lists, "step": 1}


def create(kind: str):
    model = nn.Linear(3, 2).bfloat16()
    parameters = [model.weight, model.bias]
    optimizers = {"first": torch.optim.SGD(parameters[:1], momentum=0.9), "second": Exact(parameters[1:])}
    optimizer = Exact(parameters) if kind == "alone" else optimizers
    return make_trainer([], model, optimizer=optimizer)


@pytest.mark.parametrize("kind", ["alone", "combined"])
def test_values_of_another_type_keep_it_when_loaded(kind, tmp_path):
    saved = create(kind)
    for parameter in saved.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    saved.optimizer.step()
    state = saved.optimizer.state_dict()
    assert state["state"][1]["exact"].dtype == torch.float32
    saved.save_checkpoint(tmp_path / "model.pt")
    loaded = create(kind)
    loaded.load_checkpoint(tmp_path / "model.pt")
    assert same_bits(loaded.optimizer.state_dict(), state)
    with Snapshot() as snapshot:
        snapshot.keep_states([loaded.optimizer])
    assert same_bits(loaded.optimizer.state_dict(), state)


def test_a_state_of_torch_has_the_type_of_the_parameter(tmp_path):
    saved = make_trainer([], nn.Linear(3, 2), optimizer=partial(torch.optim.SGD, momentum=0.9))
    train(saved, train_dataset=TensorDataset(torch.ones(4, 3), torch.ones(4, 2)))
    saved.save_checkpoint(tmp_path / "model.pt")
    model = nn.Linear(3, 2).bfloat16()
    loaded = make_trainer([], model, optimizer=torch.optim.SGD(model.parameters(), momentum=0.9))
    loaded.load_checkpoint(tmp_path / "model.pt")
    assert loaded.optimizer.state_dict()["state"][0]["momentum_buffer"].dtype == torch.bfloat16
