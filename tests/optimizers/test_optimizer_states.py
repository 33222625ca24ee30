"""States of optimizers of others than torch are loaded with the types that they were saved with."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from pytorch_accel_lite.loop.snapshot import Snapshot
from tests.small_models import make_model, make_trainer, same_bits, train


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


class Wrapping(torch.optim.SGD):
    """Has states of its own form, as optimizers that wrap another have, such as the Lookahead of pytorch_optimizer."""

    def state_dict(self):
        return {"base_optimizer": super().state_dict(), "lookahead_state": {(0, 0): {"counter": 3}}}

    def load_state_dict(self, state_dict):
        assert state_dict.keys() == {"base_optimizer", "lookahead_state"}
        super().load_state_dict(state_dict["base_optimizer"])


def wrapping(model: nn.Module, kind: str) -> Optimizer | list[Optimizer]:
    """An optimizer with states of its own form, or three of which it is the second."""
    if kind == "alone":
        return Wrapping(model.parameters(), momentum=0.9)
    first, *others, last = model.parameters()
    kinds = (torch.optim.AdamW, partial(Wrapping, momentum=0.9), torch.optim.AdamW)
    return [create(part) for create, part in zip(kinds, ([first], others, [last]), strict=True)]


@pytest.mark.parametrize("kind", ["alone", "combined"])
@pytest.mark.parametrize("load", ["checkpoint", "state"])
def test_a_state_of_another_form_is_loaded_by_its_optimizer(load, kind, tmp_path):
    saved, loaded = [make_trainer(model=m, optimizer=wrapping(m, kind)) for m in (make_model(), make_model())]
    saved.callback_handler.add_callback(SaveTrainingStateCallback(tmp_path / "states"))
    train(saved)
    saved.save_checkpoint(tmp_path / "model.pt")
    if load == "checkpoint":
        loaded.load_checkpoint(tmp_path / "model.pt")
    else:
        train(loaded, resume_from=next((tmp_path / "states").glob("update-*")))
    assert same_bits(loaded.optimizer.state_dict(), saved.optimizer.state_dict())
