"""Checkpoints that do not fit, or are none: the file and what is wrong are named, and nothing is loaded."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.checkpoint.models.optimizer_state_loading import load_optimizer_state
from pytorch_accel_lite.optimizers.scheduled_options import noted_options
from tests.checkpoint.small_checkpoints import Holder, save_file, trained
from tests.small_models import (
    adamw_trainer,
    equal_weights,
    float64_data,
    float64_model,
    make_data,
    make_model,
    make_trainer,
    same_bits,
    train,
    weights,
)


def refuse_file(path: Path, error: type[Exception], match: str, trainer: Trainer | None = None, **kwargs: Any) -> str:
    """Expect an error that names the file, and an unchanged trainer."""
    trainer = trainer or trained()
    before = weights(trainer.model), copy.deepcopy(trainer.optimizer.state_dict()) if trainer.optimizer else None
    with pytest.raises(error, match=match) as caught:
        trainer.load_checkpoint(path, **kwargs)
    assert equal_weights(weights(trainer.model), before[0])
    assert not trainer.optimizer or same_bits(trainer.optimizer.state_dict(), before[1])
    return str(caught.value)


def test_keys_and_shapes_that_do_not_fit_are_all_listed(tmp_path):
    state = make_model(1).state_dict()
    state["0.weight"] = torch.zeros(8, 5)
    state["4.gamma"] = torch.zeros(1)
    del state["2.bias"]
    torch.save({"model_state_dict": state}, tmp_path / "model.pt")
    message = refuse_file(tmp_path / "model.pt", ValueError, "does not fit the model Sequential")
    assert str(tmp_path / "model.pt") in message
    assert "missing in the checkpoint: 2.bias" in message
    assert "not in the model: 4.gamma" in message
    assert "0.weight (checkpoint (8, 5), model (8, 4))" in message


def test_a_refused_state_of_another_optimizer_changes_nothing(tmp_path):
    train(make_trainer()).save_checkpoint(tmp_path / "sgd.pt")
    model = make_model(0)
    trainer = make_trainer(model=model, optimizer=torch.optim.Adam(model.parameters(), 0.01), seed=0)
    trainer.train(make_data(), 1, per_device_batch_size=4)
    before = copy.deepcopy(trainer.optimizer.state_dict())
    with pytest.raises(
        ValueError, match=r"sgd.pt' does not fit the trainer's Adam: it is of another class .*load_optimizer=False"
    ):
        trainer.load_checkpoint(tmp_path / "sgd.pt")
    assert same_bits(trainer.optimizer.state_dict(), before)
    trainer.load_checkpoint(tmp_path / "sgd.pt", load_optimizer=False)
    trainer.train(make_data(), 1, per_device_batch_size=4)


def test_an_optimizer_with_other_groups_is_named(tmp_path):
    train(make_trainer()).save_checkpoint(tmp_path / "sgd.pt")
    model = make_model(0)
    groups = [{"params": [parameter]} for parameter in model.parameters()]
    trainer = make_trainer(model=model, optimizer=torch.optim.SGD(groups, lr=0.1))
    refuse_file(tmp_path / "sgd.pt", ValueError, r"does not fit the trainer's SGD: .*groups.*load_optimizer", trainer)


def test_a_prefix_hides_no_other_mismatch_of_a_file(tmp_path):
    state = {f"module.{key}": value for key, value in Holder(1).state_dict().items()}
    del state["module.module.2.bias"]
    torch.save({"model_state_dict": state}, tmp_path / "model.pt")
    message = refuse_file(tmp_path / "model.pt", ValueError, "missing in the checkpoint", make_trainer(model=Holder(0)))
    assert "missing in the checkpoint: module.2.bias. " in message
    assert "not in the model" not in message


def test_a_long_list_of_keys_is_cut(tmp_path):
    path = save_file(tmp_path / "model.pt", nn.ModuleList(nn.Linear(1, 1) for _ in range(50)))
    message = refuse_file(path, ValueError, "and [0-9]+ more")
    assert len(message) < 1000


class Versioned(nn.Linear):
    """Reads its state by the version that the state names, as torchvision's MNASNet does."""

    _version = 2

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
        assert local_metadata["version"] == 2
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
def test_modules_with_versioned_states_load_their_own_files(tmp_path, name):
    first, second = (make_trainer(model=nn.Sequential(Versioned(4, 1))) for _ in range(2))
    (first.save_model if name.endswith("safetensors") else first.save_checkpoint)(tmp_path / name)
    second.load_checkpoint(tmp_path / name)
    assert torch.equal(first.model[0].weight, second.model[0].weight)


def test_a_missing_file_is_named(tmp_path):
    refuse_file(tmp_path / "model.pt", FileNotFoundError, r"no checkpoint at '.*model\.pt'")


def test_a_folder_is_not_a_checkpoint(tmp_path):
    refuse_file(tmp_path, FileNotFoundError, "no checkpoint at")


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize(
    "content", [b"", b"this is no checkpoint", b"PK\x03\x04 broken", pickle.dumps({"a": 1})], ids=repr
)
def test_a_file_that_is_not_a_checkpoint_is_named(tmp_path, content):
    (tmp_path / "model.pt").write_bytes(content)
    refuse_file(tmp_path / "model.pt", ValueError, r"model\.pt' cannot be loaded as plain tensors and values")


@pytest.mark.parametrize(
    ("content", "holds"), [([1, 2], "list"), ({"state_dict": {}, "epoch": 1}, "'state_dict', 'epoch'"), ({}, "dict")]
)
def test_a_torch_file_without_model_state_dict_is_refused(tmp_path, content, holds):
    torch.save(content, tmp_path / "model.pt")
    message = rf"model\.pt' is not a checkpoint: it has no 'model_state_dict'\. It holds {holds}\. Load what"
    refuse_file(tmp_path / "model.pt", ValueError, message)


def test_weights_that_torch_has_saved_are_loaded(tmp_path):
    model = make_model(seed=5)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    trainer = make_trainer(model=make_model())
    trainer.load_checkpoint(tmp_path / "model.pt")
    assert equal_weights(weights(trainer.model), weights(model))


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.99])
def test_a_file_that_was_cut_short_is_named(tmp_path, keep):
    trained().save_checkpoint(tmp_path / "model.pt")
    content = (tmp_path / "model.pt").read_bytes()
    (tmp_path / "model.pt").write_bytes(content[: int(len(content) * keep)])
    refuse_file(tmp_path / "model.pt", ValueError, r"model\.pt' cannot be loaded as plain tensors and values")


class Malicious:
    """Runs a program when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return subprocess.check_call, ([sys.executable, "-c", f"open({str(self.trace)!r}, 'w')"],)


def test_code_in_a_checkpoint_is_not_run(tmp_path):
    trace = tmp_path / "was_run"
    pickle.loads(pickle.dumps(Malicious(trace)))
    assert trace.exists()  # the program really runs when nothing prevents it
    trace.unlink()
    save_file(tmp_path / "model.pt", make_model(1), extra=Malicious(trace))
    refuse_file(tmp_path / "model.pt", ValueError, r"model\.pt' cannot be loaded")
    assert not trace.exists()


def test_loading_a_checkpoint_with_an_optimizer_needs_one(tmp_path):
    trained().save_checkpoint(tmp_path / "model.pt")
    trainer = make_trainer(model=make_model(1), optimizer=None)
    refuse_file(tmp_path / "model.pt", ValueError, "no optimizer.*load_optimizer=False", trainer)
    trainer.load_checkpoint(tmp_path / "model.pt", load_optimizer=False)


def test_the_state_of_another_optimizer_is_refused(tmp_path):
    trained().save_checkpoint(tmp_path / "model.pt")
    model = make_model(1)
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
    trainer = make_trainer(model=model, optimizer=torch.optim.Adam(groups))
    refuse_file(tmp_path / "model.pt", ValueError, "parameter group", trainer)


class Weighted(nn.Module):
    """A loss function with a trained weight of any size."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(size))

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs - targets).square().mean() * self.w.square().mean()


def weighted(size: int, make: Any, named: bool = False) -> Trainer:
    model, loss_func = make_model(), Weighted(size)
    modules = nn.ModuleList([model, loss_func])
    optimizer = make(modules.named_parameters() if named else modules.parameters(), lr=0.01)
    return make_trainer(model=model, loss_func=loss_func, optimizer=optimizer)


OPTIMIZERS = [partial(torch.optim.SGD, momentum=0.9), *(getattr(torch.optim, name) for name in ("Adam", "Adamax"))]
OPTIMIZERS += [torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.ASGD, torch.optim.Rprop]


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.filterwarnings("ignore:.*holds parts of the loss function")
def test_a_state_for_a_parameter_of_another_shape_is_refused(tmp_path, make):
    train(weighted(2, make)).save_checkpoint(tmp_path / "model.pt")
    match = r"does not fit .*: '\w+' of parameter 4 has the shape \(2,\) there, but .* has \(3,\) here.*load_optimizer"
    refuse_file(tmp_path / "model.pt", ValueError, match, weighted(3, make))


def test_a_parameter_of_another_shape_is_named_if_it_has_a_name(tmp_path):
    train(weighted(2, torch.optim.Adam)).save_checkpoint(tmp_path / "model.pt")
    refuse_file(
        tmp_path / "model.pt", ValueError, r"parameter 4 \(1\.w\) has", weighted(3, torch.optim.Adam, named=True)
    )


def test_a_loss_function_of_another_shape_is_warned_of(tmp_path):
    train(weighted(2, torch.optim.Adam)).save_checkpoint(tmp_path / "model.pt", save_optimizer=False)
    with pytest.warns(UserWarning, match=r"in another shape: w \(2,\), here \(3,\). They are ignored") as caught:
        weighted(3, torch.optim.Adam).load_checkpoint(tmp_path / "model.pt")
    assert len(caught) == 1


class LowRank(torch.optim.SGD):
    """Keeps a smaller state than the parameter, as GaLore does."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("exp_avg", parameter.new_zeros(2)[: parameter.ndim])


def test_optimizers_of_others_may_have_smaller_states(tmp_path):
    first, second = weighted(3, LowRank), weighted(3, LowRank)
    train(first).save_checkpoint(tmp_path / "model.pt")
    second.load_checkpoint(tmp_path / "model.pt")
    assert same_bits(second.optimizer.state_dict(), first.optimizer.state_dict())


SMALLER = [partial(torch.optim.LBFGS, max_iter=1), torch.optim.Adafactor, partial(torch.optim.NAdam, foreach=True)]


@pytest.mark.parametrize("make", SMALLER)
def test_entries_of_torch_with_shapes_of_their_own_are_loaded(make):
    def trained_optimizer() -> torch.optim.Optimizer:
        parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(4, 2))]
        optimizer = make(parameters)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = sum(parameter.square().sum() for parameter in parameters)
            loss.backward()
            return loss

        optimizer.step(closure)
        return optimizer

    first, second = trained_optimizer(), trained_optimizer()
    load_optimizer_state(second, first.state_dict())
    assert same_bits(second.state_dict(), first.state_dict())


def with_critic(size: int = 3, optimizer_class: Any = torch.optim.Adam, rate: float = 0.5) -> Trainer:
    """A trainer whose loss function, critic and critic's optimizer are trained, so checkpoints have them."""
    model, loss_func = make_model(), nn.MSELoss()
    loss_func.scale = nn.Parameter(torch.full((), rate))
    parameters = [*model.parameters(), loss_func.scale]
    optimizer = torch.optim.SGD(parameters, lr=rate, momentum=0.9)
    trainer = make_trainer(model=model, loss_func=loss_func, optimizer=optimizer)
    trainer.critic = nn.Linear(size, 1)
    trainer.critic_optimizer = optimizer_class(trainer.critic.parameters(), lr=rate)
    return train(trainer, create_scheduler_fn=lambda optimizer: StepLR(optimizer, step_size=round(10 * rate)))


def all_states(trainer: Trainer) -> Any:
    owners = (trainer.model, trainer.loss_func, trainer.critic, trainer.scheduler)
    optimizers = (trainer.optimizer, trainer.critic_optimizer)
    options = [noted_options(optimizer) for optimizer in optimizers]
    return copy.deepcopy([*(owner.state_dict() for owner in (*owners, *optimizers)), options])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"size": 2}, "The critic in .* does not fit the trainer's Linear.*of a different shape: weight"),
        ({"optimizer_class": torch.optim.SGD}, "The critic_optimizer in .* does not fit the trainer's SGD"),
    ],
)
def test_nothing_is_loaded_if_an_attribute_does_not_fit(tmp_path, change, match):
    with_critic().save_checkpoint(tmp_path / "model.pt")
    trainer = with_critic(rate=0.1, **change)
    before = all_states(trainer)
    with pytest.raises(ValueError, match=match):
        trainer.load_checkpoint(tmp_path / "model.pt")
    assert same_bits(all_states(trainer), before)
    train(trainer)


class Extremes(nn.Module):
    """Has a buffer for each feature once it has seen a batch, and loads it itself, as observers of quantisation do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(0, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = x.detach().amax(0)
        self.largest = torch.maximum(self.largest, found) if self.largest.numel() else found
        return x

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        self.largest = self.largest.new_zeros(state[f"{prefix}largest"].shape)
        super()._load_from_state_dict(state, prefix, *args)


def test_modules_that_load_themselves_may_have_other_shapes(tmp_path):
    first, second = (adamw_trainer(nn.Sequential(Extremes(), float64_model())) for _ in range(2))
    first.train(float64_data(), num_epochs=1)
    first.save_checkpoint(tmp_path / "model.pt")
    second.load_checkpoint(tmp_path / "model.pt")
    assert equal_weights(weights(second.model), weights(first.model))


ODD: dict[str, dict[str, Any]] = {
    "model_state_dict": {"model_state_dict": [1]},
    "attribute_state_dicts": {"attribute_state_dicts": 5},
    "frozen_weights": {"frozen_weights": 3},
    "'model_state_dict' is not a dict with names": {"model_state_dict": {0: torch.ones(1)}},
    r"0.bias \(checkpoint str, model \(8,\)\)": {"model_state_dict": make_model().state_dict() | {"0.bias": "none"}},
    "The optimizer in .* does not fit": {"optimizer_state_dict": "none"},
    "The scheduler in .* does not fit": {"scheduler_state_dict": 3},
}


@pytest.mark.parametrize("match", ODD)
def test_a_file_with_odd_entries_is_named(tmp_path, match):
    trainer = train(make_trainer(), create_scheduler_fn=partial(StepLR, step_size=2))
    torch.save({"model_state_dict": make_model(1).state_dict()} | ODD[match], tmp_path / "odd.pt")
    assert "odd.pt" in refuse_file(tmp_path / "odd.pt", ValueError, match, trainer)


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": {"0.weight": 5}}'])
def test_a_damaged_index_of_files_is_named(tmp_path, content):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    refuse_file(
        tmp_path, ValueError, r"model.safetensors.index.json' is damaged, or not the index", load_optimizer=False
    )
