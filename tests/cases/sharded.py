"""Sharded weights (FSDP2): a run that is resumed in its middle, uneven shares, and what is refused.

On machines without GPUs Accelerate ignores its FSDP plugin, so it is told that it has several of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.tensor import DTensor

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.callbacks import (
    GradualUnfreezingCallback,
    ModelEmaCallback,
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


def sharding_accelerator(version: int = 2) -> Accelerator:
    PartialState(cpu=True)._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=version))


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
        "average": ModelEmaCallback(save_path=None),
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
