"""States of optimizers: the types of their values, the identity and order of their groups, and their schedules."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from pytorch_accel_lite import Trainer, TrainerCallback
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from pytorch_accel_lite.loop.snapshot import Snapshot
from tests.small_models import float64_data, make_model, make_trainer, same_bits, train


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


class HoldsGroups:
    """A user's schedule, which keeps the groups of the optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.groups, self.steps = optimizer, optimizer.param_groups, 0

    def step(self) -> None:
        self.steps += 1
        for group in self.groups:
            group["lr"] = 0.1 / (1 + self.steps)

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


class LowersRates(TrainerCallback):
    """Takes the groups before a state is loaded again."""

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        self.groups = trainer.optimizer.param_groups

    def on_update_end(self, trainer: Trainer, **kwargs: Any) -> None:
        for group in self.groups:
            group["weight_decay"] += 0.01


def by_names(model: nn.Module, names: list[str]) -> torch.optim.Optimizer:
    parameters = dict(model.named_parameters())
    return torch.optim.Adam([parameters[name] for name in names], lr=0.02)


@pytest.mark.parametrize("in_order", [True, False])
def test_optimizers_resume_in_any_order_of_parameters(tmp_path, in_order):
    def trained(folder: str, names: list[str], resume_from: Path | None = None) -> Any:
        model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 1)).double()
        model.load_state_dict({name: torch.ones_like(value) * 0.1 for name, value in model.state_dict().items()})
        saving = SaveTrainingStateCallback(tmp_path / folder, save_every_n_steps=1)
        optimizer = by_names(model, names)
        trainer = Trainer(model, nn.MSELoss(), optimizer, [LowersRates(), saving], seed=0)
        schedule = {"create_scheduler_fn": HoldsGroups}
        trainer.train(float64_data(24), 2, per_device_batch_size=6, resume_from=resume_from, **schedule)
        return model.state_dict(), trainer.optimizer.state_dict()

    names = [f"{layer}.{kind}" for layer in range(3) for kind in ("weight", "bias")]
    whole = trained("whole", names)
    again = names if in_order else [*names[2:], *names[:2]]
    assert same_bits(trained("again", again, tmp_path / "whole" / "update-000000005"), whole)


def test_a_schedule_that_states_cannot_keep_is_refused_early(tmp_path):
    class Forgets:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

        def step(self) -> None: ...

    trainer = make_trainer([SaveTrainingStateCallback(tmp_path)])
    with pytest.raises(TypeError, match=r"Forgets, the scheduler, has no state_dict\(\)"):
        train(trainer, create_scheduler_fn=Forgets)
    assert trainer.progress.update == 0
