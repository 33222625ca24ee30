"""Optimizers that a trainer makes itself."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LinearLR

from pytorch_accel_lite import Trainer, TrainerPlaceholderValues
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from tests.cases.common import shared_folder, world_size
from tests.cases.sharded import make_model, sharding_accelerator, whole
from tests.launching import some_of
from tests.tasks import regression_data, small_model, weights

DATA = regression_data(26)


def train_with(make: Any, folder: Path | None = None, **kwargs: Any) -> Trainer:
    """Train with clipping, accumulation and a schedule; ``make`` gives the optimizer for a model."""
    model = small_model()
    states = SaveTrainingStateCallback(folder or "unused", save_every_n_steps=1, max_checkpoints=None)
    trainer = Trainer(model, nn.MSELoss(), make(model), callbacks=[] if folder is None else [states], seed=0)
    trainer.train(
        DATA,
        2,
        per_device_batch_size=4 // world_size(),
        gradient_accumulation_steps=2,
        gradient_clip_norm=0.5,
        create_scheduler_fn=partial(LinearLR, total_iters=TrainerPlaceholderValues.MAX_NUM_TRAIN_STEPS),
        **kwargs,
    )
    return trainer


def factory(model: nn.Module) -> Any:
    return partial(AdamW, lr=0.02)


def made(model: nn.Module) -> Any:
    return AdamW(model.parameters(), lr=0.02)


def trained_and_resumed() -> dict[str, Any]:
    """Return weights after a run with a factory, after those that resumed some of its states, and with an optimizer."""
    with shared_folder() as folder:
        first = weights(train_with(factory, folder / "whole").get_model())
        states = some_of(state for state in sorted((folder / "whole").iterdir()) if state.is_dir())
        again = [train_with(factory, folder / "again", resume_from=state) for state in states]
        resumed = [weights(trainer.get_model()) for trainer in again]
    return {"whole": first, "resumed": resumed, "made": weights(train_with(made).get_model())}


def sharded_by_accelerate() -> Any:
    """Return what a model learns with each optimizer that is sharded when a run prepares it: first an evaluation."""
    accelerator = sharding_accelerator()
    return [_trained(make_model(), optimizer, accelerator) for optimizer in (factory, made)]


def sharded_by_the_user() -> Any:
    """The same of one that is sharded on the meta device, where all parameters look alike, and initialised then."""
    found = []
    for optimizer in (factory, made):
        values = [parameter.detach() for parameter in make_model().parameters()]
        with torch.device("meta"):
            model = make_model()
        for layer in (model[0], model[3], model):
            fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
        model.to_empty(device="cpu")
        with torch.no_grad():
            for own, value in zip(model.parameters(), values, strict=True):
                own.copy_(distribute_tensor(value, own.device_mesh, own.placements))
        found.append(_trained(model, optimizer, Accelerator(cpu=True)))
    return found


def _trained(model: nn.Module, make: Any, accelerator: Accelerator) -> dict[str, torch.Tensor]:
    trainer = Trainer(model, nn.MSELoss(), make(model), (), accelerator=accelerator, seed=3)
    trainer.evaluate(DATA, 3)
    for _ in range(2):
        trainer.train(DATA, 1, per_device_batch_size=3, gradient_clip_norm=1)
    parameters = [p for group in trainer.optimizer.param_groups for p in group["params"]]
    assert all(isinstance(parameter, DTensor) for parameter in parameters)
    assert set(parameters) == set(trainer.model.parameters())
    return whole(trainer.get_model().state_dict())
