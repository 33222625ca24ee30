"""Sharded weights (FSDP2): a run that is resumed in its middle, uneven shares, and what is refused.

On machines without GPUs Accelerate ignores its FSDP plugin, so it is told that it has several of them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from pytorch_accel_lite import Trainer, TrainerCallback
from pytorch_accel_lite.callbacks import (
    GradualUnfreezingCallback,
    PredictionWriterCallback,
    SaveTrainingStateCallback,
    SkipFailedBatchesCallback,
    WorstSamplesCallback,
    read_predictions,
)
from tests.scripts.resumable import CopyStates
from tests.tasks import equal, listener, regression_data


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1)).double()


def sharding_accelerator(version: int = 2, of_accelerator: Any = None, **kwargs: Any) -> Accelerator:
    PartialState(cpu=True)._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, **kwargs)
    return Accelerator(fsdp_plugin=plugin, **(of_accelerator or {}))


def run(folder: Path, accelerator: Accelerator | None, resume_from: Any = None) -> Trainer:
    model = make_model()
    saving = SaveTrainingStateCallback(folder / "states", 1, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    callbacks = [saving, CopyStates(folder)]
    trainer = Trainer(model, nn.MSELoss(), optimizer, callbacks, accelerator=accelerator, seed=3)
    trainer.train(regression_data(22), 2, regression_data(9), 3, resume_from=resume_from)
    return trainer


def whole(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}


def on_two_processes(folder: Path) -> Any:
    """The final weights, whole, and the losses; each run that is resumed from a state ends with the same."""
    accelerator = sharding_accelerator()
    trainer = run(folder / "whole", accelerator)
    assert trainer.accelerator.distributed_type == DistributedType.FSDP
    assert any(isinstance(parameter, DTensor) for parameter in trainer.model.parameters())
    expected = whole(trainer.model.state_dict())
    losses = trainer.run_history.to_dict()
    trainer.save_model(folder / "model.safetensors")
    trainer.save_checkpoint(folder / "model.pt")
    for copy in sorted((folder / "whole" / "copies").glob("*/update-*")):
        again = run(folder / f"again-{copy.parent.name}", accelerator, copy)
        assert equal(whole(again.model.state_dict()), expected), copy
        assert again.run_history.to_dict() == losses
    return expected, losses


class UsesIt(TrainerCallback):
    """Calls a sharded model's trainer within its run."""

    def __init__(self) -> None:
        self.calls = 0

    def on_train_step_end(self, trainer, **kwargs):
        self.calls += 1
        assert trainer.is_running
        assert trainer.is_sharded
        with pytest.raises(RuntimeError, match="cannot be called within a run"):
            trainer.train(regression_data(8), 1)
        with pytest.raises(RuntimeError, match="cannot be called within a run"):
            trainer.find_lr(regression_data(8))
        indices = trainer.batch_indices
        trainer.evaluate(regression_data(5), 2)
        trainer.predict(regression_data(5), 2)
        assert trainer.batch_indices == indices


def _used_again(make_trainer: Callable[[list[Any]], Trainer]) -> dict[str, torch.Tensor]:
    """The final weights, the same with and without use within the run and between two runs."""
    found = []
    for uses in (False, True):
        callback = UsesIt()
        trainer = make_trainer([callback] if uses else [])
        assert not trainer.is_running
        trainer.train(
            regression_data(22), 1, regression_data(9), 3, gradient_accumulation_steps=2, gradient_clip_norm=1
        )
        assert callback.calls == (4 if uses else 0)
        assert not trainer.is_running
        if uses:
            before = whole(trainer.get_model().state_dict())
            metrics = trainer.evaluate(regression_data(9), 3)
            assert metrics["evaluation_loss"] == trainer.run_history.get_latest_metric("eval_loss_epoch")
            assert trainer.predict(regression_data(9), 3).shape == (9, 1)
            tried = trainer.find_lr(regression_data(22), 3, num_steps=12)
            assert len(tried.lrs) > 3
            assert not trainer.is_running
            assert equal(whole(trainer.get_model().state_dict()), before)
        trainer.train(regression_data(22), 1, regression_data(9), 3, gradient_accumulation_steps=2)
        found.append(whole(trainer.get_model().state_dict()))
    assert equal(*found)
    return found[0]


def by_accelerate_is_used_again(folder: Path) -> Any:
    accelerator = sharding_accelerator()

    def make_trainer(callbacks: list[Any]) -> Trainer:
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return Trainer(model, nn.MSELoss(), optimizer, callbacks, accelerator=accelerator, seed=3)

    return _used_again(make_trainer)


def by_the_user_is_used_again(folder: Path) -> Any:
    def make_trainer(callbacks: list[Any]) -> Trainer:
        model = make_model()
        for layer in (model[0], model[3], model):
            fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return Trainer(model, nn.MSELoss(), optimizer, callbacks, accelerator=Accelerator(cpu=True), seed=3)

    return _used_again(make_trainer)


def without_what_is_frozen(folder: Path) -> Any:
    """The weights of a run, of one resumed from a state without frozen weights, and of a model that loads its files."""

    def train(name: str, head_seed: int = 0, resume_from: Path | None = None) -> Trainer:
        model = make_model()
        torch.manual_seed(head_seed)
        model[3].reset_parameters()
        model[0].requires_grad_(False)
        for layer in (model[0], model[3], model):
            fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
        optimizer = torch.optim.AdamW(model[3].parameters(), lr=0.01)
        saving = SaveTrainingStateCallback(folder / name, save_every_n_steps=1, trainable_only=True)
        trainer = Trainer(model, nn.MSELoss(), optimizer, [saving], accelerator=Accelerator(cpu=True), seed=3)
        trainer.train(regression_data(12), 1, per_device_batch_size=3, resume_from=resume_from)
        return trainer

    found = [trainer := train("whole")]
    trainer.save_model(folder / "model.safetensors", trainable_only=True)
    trainer.save_checkpoint(folder / "model.pt", trainable_only=True)
    found.append(train("again", 5, folder / "whole" / "update-000000001"))
    for file in ("model.safetensors", "model.pt"):
        found.append(train(file.replace(".", "-"), 5))
        found[-1].load_checkpoint(folder / file)
    return [whole(trainer.get_model().state_dict()) for trainer in found]


def _trained(accelerator: Accelerator, callbacks: list[Any], **kwargs: Any) -> Trainer:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = Trainer(model, nn.MSELoss(), optimizer, callbacks, accelerator=accelerator, seed=3)
    trainer.train(regression_data(12), 1, per_device_batch_size=3, **kwargs)
    return trainer


def of_seven_samples(folder: Path) -> Any:
    """A process takes part in a step in which it has no sample."""
    accelerator, data = sharding_accelerator(), regression_data(7)
    worst, writer = WorstSamplesCallback(7), PredictionWriterCallback(folder / "predictions")
    trainer = _trained(accelerator, [worst])
    weights = whole(trainer.model.state_dict())
    loss = trainer.evaluate(data, per_device_batch_size=3)["evaluation_loss"]
    _trained(accelerator, [writer]).predict(data, per_device_batch_size=3)
    return weights, loss, {sample.index: sample.loss for sample in worst.samples}, read_predictions(writer.directory)


def refusals() -> dict[str, str]:
    """What cannot be done with sharded weights, and what is said of it."""
    accelerator, said = sharding_accelerator(), {}
    for name, callback in {
        "unfreeze": GradualUnfreezingCallback(),
        "rewrap": listener(on_train_epoch_start=Trainer.rewrap_model),
        "skip": SkipFailedBatchesCallback(),
    }.items():
        try:
            _trained(accelerator, [callback])
        except (ValueError, RuntimeError) as error:
            said[name] = str(error)
    return said


def state_of_fsdp1(folder: Path) -> str | None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = Trainer(model, nn.MSELoss(), optimizer, [], accelerator=sharding_accelerator(version=1))
    try:
        trainer.save_training_state(folder / "state")
    except ValueError as error:
        return str(error)
    return None
