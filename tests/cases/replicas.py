"""Processes whose weights drift apart, and those whose weights agree."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pytorch_accel_lite import Trainer, TrainerCallback
from pytorch_accel_lite.callbacks import ReplicaCheckCallback
from tests.cases.common import rank, world_size
from tests.tasks import quiet_trainer, regression_data, small_model, weights

DATA = regression_data(48)


class BareModel(Trainer):
    """Calls the module and not its wrapper."""

    def calculate_train_batch_loss(self, batch: Any) -> Any:
        return {"loss": self.loss_func(self.get_model()(batch[0]), batch[1])}


class BareSometimes(BareModel):
    """Calls the module in every step but the first."""

    def calculate_train_batch_loss(self, batch: Any) -> Any:
        if self.progress.update:
            return super().calculate_train_batch_loss(batch)
        return Trainer.calculate_train_batch_loss(self, batch)


class Averaging(BareModel):
    """Averages the gradients itself."""

    def clip_gradients(self) -> None:
        for parameter in self.get_model().parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= self.ranks.world_size


class WithCritic(Trainer):
    """Trains a second module, which is not wrapped."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.critic = nn.Linear(5, 1, dtype=torch.float64)
        self.ranks.copy_from_first(self.critic.parameters())
        self.critic_optimizer = torch.optim.SGD(self.critic.parameters(), lr=0.1)

    def optimizer_step(self) -> None:
        super().optimizer_step()
        self.critic(torch.full((1, 5), 1.0 + rank(), dtype=torch.float64)).sum().backward()
        self.critic_optimizer.step()
        self.critic_optimizer.zero_grad()


class Unfreezing(TrainerCallback):
    def on_train_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
        if trainer.progress.epoch == 2:
            trainer.get_model()[0].requires_grad_(True)


class WithSpare(nn.Module):
    """Has a layer that the loss does not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.used = small_model()
        self.spare = nn.Linear(5, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.used(inputs)


def _frozen_model() -> nn.Module:
    model = small_model()
    model[0].requires_grad_(False)
    return model


class UpsetAt(TrainerCallback):
    """Changes one bit of one weight on the last rank, after some updates. (It may heal in the next one.)"""

    def __init__(self, update: int) -> None:
        self.update = update

    def on_update_end(self, trainer: Trainer, **kwargs: Any) -> None:
        if trainer.progress.update == self.update and rank() == world_size() - 1:
            bias = trainer.get_model()[2].bias.detach()
            bias.copy_(torch.nextafter(bias, bias + 1))


def _train(trainer_class: type[Trainer] = Trainer, model: nn.Module | None = None, **kwargs: Any) -> Any:
    model = small_model() if model is None else model
    kwargs.setdefault("callbacks", [])
    trainer = trainer_class(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.05), seed=0, **kwargs)
    try:
        trainer.train(DATA, 3, per_device_batch_size=4)
    except RuntimeError as error:
        return trainer.progress.update, trainer.progress.epoch, str(error)
    return weights(model)


def drifting() -> dict[str, Any]:
    """How far each run came, and what it said, or the weights at its end."""
    return {
        "bare model": _train(BareModel),
        "bare sometimes": _train(BareSometimes),
        "critic": _train(WithCritic),
        "unfrozen": _train(model=_frozen_model(), callbacks=[Unfreezing()]),
        "unused": _train(model=WithSpare()),
        "one bit": _train(callbacks=[UpsetAt(len(DATA) // (4 * world_size()))]),
        "one bit, checked often": _train(callbacks=[UpsetAt(2), ReplicaCheckCallback(2)]),
        "on purpose": _train(BareModel, check_replicas=False),
    }


def agreeing() -> list[dict[str, torch.Tensor]]:
    return [_train(Averaging), _train()]


def asked_for_other_things() -> list[str]:
    """What is said where the ranks are given different arguments."""
    said = []
    for seed, arguments in ((rank(), {}), (0, {"per_device_batch_size": 2 + rank()}), (0, {"num_epochs": 1 + rank()})):
        trainer = quiet_trainer(copy.deepcopy(small_model()), seed=seed)
        try:
            trainer.train(DATA, **{"num_epochs": 1} | arguments)
        except ValueError as error:
            said.append(str(error))
    return said
