"""What is trained beside the model: by the loss function, and by a subclass's own modules and optimizers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import StepLR

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from tests.cases.common import rank, world_size
from tests.launching import some_of
from tests.tasks import regression_data, small_model

DATA = regression_data(24)


class Adversarial(Trainer):
    """Has a head that the trainer's optimizer trains, a critic with an optimizer of its own, and a frozen teacher."""

    def __init__(self, seed: int = 0, critic_size: int = 1, **kwargs: Any) -> None:
        model = small_model(seed)
        torch.manual_seed(seed)
        self.head = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1)).double()
        self.critics = [nn.Sequential(nn.Linear(1, critic_size), nn.Dropout(0.2), nn.Linear(critic_size, 1)).double()]
        self.critic_optimizer = torch.optim.Adam(self.critics[0].parameters(), lr=0.05)
        self.critic_scheduler = StepLR(self.critic_optimizer, step_size=3, gamma=0.5)
        self.teacher = small_model(1).requires_grad_(False)
        optimizer = torch.optim.SGD([*model.parameters(), *self.head.parameters()], lr=0.05, momentum=0.9)
        super().__init__(model, nn.MSELoss(), optimizer, seed=0, **{"callbacks": []} | kwargs)

    def calculate_train_batch_loss(self, batch: Any) -> Any:
        outputs = self.head(self.model(batch[0]))
        self._train_critic(outputs.detach(), self.teacher(batch[0]))
        return {"loss": self.loss_func(outputs, batch[1]) - 0.1 * self.critics[0](outputs).mean()}

    def _train_critic(self, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        (self.critics[0](ours).mean() - self.critics[0](theirs).mean()).backward()
        for parameter in self.critics[0].parameters():
            if world_size() > 1:
                dist.all_reduce(parameter.grad)
        self.critic_optimizer.step()
        self.critic_optimizer.zero_grad()

    def optimizer_step(self) -> None:
        super().optimizer_step()
        self.critic_scheduler.step()
        self.critic_scheduler.optimizer.zero_grad()

    def everything(self) -> dict[str, Any]:
        """All that is trained, as one dict."""
        return {
            "model": copy.deepcopy(self.model.state_dict()),
            "head": copy.deepcopy(self.head.state_dict()),
            "critic": copy.deepcopy(self.critics[0].state_dict()),
            "critic_optimizer": copy.deepcopy(self.critic_optimizer.state_dict()),
            "critic_scheduler": copy.deepcopy(self.critic_scheduler.state_dict()),
        }


def from_every_state(folder: Path, trainer_class: type[Adversarial] = Adversarial) -> list[dict[str, Any]]:
    """What an uninterrupted run ends with, and runs that were resumed from some of its states."""
    saving = SaveTrainingStateCallback(folder / "states", save_every_n_steps=1, max_checkpoints=None)
    whole = trainer_class(callbacks=[saving])
    whole.train(DATA, 2, per_device_batch_size=4)
    results = [whole.everything()]
    states = sorted((folder / "states").glob("update-*"))
    whole.ranks.barrier()
    for state in some_of(states[:-1]):
        again = SaveTrainingStateCallback(folder / f"from {state.name}")
        resumed = trainer_class(seed=9, callbacks=[again])
        resumed.train(DATA, 2, per_device_batch_size=4, resume_from=state)
        results.append(resumed.everything())
    return results


class Normed(nn.Module):
    """A loss with running statistics, a scale that is learned, and a part that is not to be trained."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1, affine=False).double()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.teacher = nn.Dropout(0.5).eval()
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean = 0.5 * self.mean + outputs.detach().mean()
        errors = self.norm(outputs - self.teacher(targets)) + outputs - targets
        return errors.square().mean() * torch.exp(-self.scale) + self.scale


def normed_trainer(callbacks: Any = (), **kwargs: Any) -> Trainer:
    model, loss_func = small_model(), Normed()
    optimizer = torch.optim.SGD([*model.parameters(), *loss_func.parameters()], lr=0.05, momentum=0.9)
    return Trainer(model, loss_func, optimizer, callbacks, seed=0, **kwargs)


def resumed_with_a_normed_loss(folder: Path) -> list[dict[str, Any]]:
    """The state of the loss function at the end of a run, and of those that were resumed from some of its states."""
    saving = SaveTrainingStateCallback(folder / "states", save_every_n_steps=1, max_checkpoints=None)
    whole = normed_trainer([saving])
    arguments = {"per_device_batch_size": 4, "gradient_accumulation_steps": 2 if world_size() == 1 else 1}
    whole.train(DATA, 2, DATA, **arguments)
    results = [whole.loss_func.state_dict() | {"weights": whole.model[0].weight.detach().clone()}]
    states = sorted((folder / "states").glob("update-*"))
    whole.ranks.barrier()
    for state in some_of(states[:-1]):
        torch.manual_seed(rank())
        resumed = normed_trainer([SaveTrainingStateCallback(folder / f"from {state.name}")])
        resumed.train(DATA, 2, DATA, resume_from=state, **arguments)
        results.append(resumed.loss_func.state_dict() | {"weights": resumed.model[0].weight.detach().clone()})
    return results


class Alone(Adversarial):
    """Trains its critic on each process alone."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.optimizers = [vars(self).pop("critic_optimizer")]

    def _train_critic(self, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        self.critics[0](ours + rank()).mean().backward()
        self.optimizers[0].step()


def drifting_in_a_list() -> str:
    try:
        Alone().train(DATA, 1, per_device_batch_size=4)
    except RuntimeError as error:
        return str(error)
    return ""
