"""Models, losses and trainers that refuse certain batches, or have memory for few samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.tracking import Progress
from tests.small_models import adamw_trainer, float64_data, float64_model, weights

WITHOUT_WORKERS = {"shuffle": False, "num_workers": 0}


class Fussy(nn.Module):
    """Refuses batches with certain samples, or with too many."""

    def __init__(
        self, poison: float | None = None, limit: int | None = None, error: type[Exception] = ValueError
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = nn.Linear(5, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 1)
        self.layers = nn.Sequential(*layers).double()
        self.poison, self.limit, self.error = poison, limit, error
        self.sizes: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.sizes.append(len(x))
        y = self.layers(x)
        if self.poison is not None and (x[:, 0] == self.poison).any():
            raise self.error("cannot digest this")
        if self.limit is not None and len(x) > self.limit and self.training:
            if self.error is MemoryError:
                raise MemoryError
            y = y + torch.empty(2**46, dtype=torch.float64).sum()  # 512 TiB: the allocator refuses
        return y


def without_dropout(**kwargs: Any) -> Fussy:
    model = Fussy(**kwargs)
    model.layers[1] = nn.Identity()
    return model


class Batches:
    """A batch sampler of given batches."""

    def __init__(self, batches: list[list[int]]) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def fit(model: nn.Module, callbacks: Any = (), data: Any = None, loader: Any = None, **kwargs: Any) -> Trainer:
    trainer = adamw_trainer(model, callbacks=list(callbacks))
    kwargs = {"per_device_batch_size": 4, "num_epochs": 2} | kwargs
    torch.manual_seed(4)
    trainer.train(data or float64_data(20), train_dataloader_kwargs=WITHOUT_WORKERS | (loader or {}), **kwargs)
    return trainer


def histories_agree(first: Trainer, second: Trainer) -> bool:
    one, other = first.run_history.to_dict(), second.run_history.to_dict()
    return one.keys() == other.keys() and all(one[name] == pytest.approx(other[name]) for name in one)


ALL_BUT_THE_THIRD = {"batch_sampler": Batches([[0, 1, 2, 3], [4, 5, 6, 7], [12, 13, 14, 15], [16, 17, 18, 19]])}


class Watched(nn.MSELoss):
    """A loss whose mean is assigned again by each batch, and which refuses certain targets afterwards."""

    def __init__(self, poison: float | None, limit: int | None) -> None:
        super().__init__()
        self.poison, self.limit = poison, limit
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.mean = 0.5 * self.mean + outputs.detach().mean()
        loss = super().forward(outputs * self.scale, targets)
        if self.limit is not None and len(outputs) > self.limit:
            raise MemoryError
        if self.poison is not None and (targets == self.poison).any():
            loss.backward(retain_graph=True)
            raise ValueError("cannot digest this")
        return loss


class Critical(Trainer):
    """Trains a critic in each step, keeps gradients of another for the next one, and counts in a registered object."""

    def __init__(self, poison: float | None = None, limit: int | None = None, **kwargs: Any) -> None:
        torch.manual_seed(0)
        model, loss = nn.Linear(5, 1).double(), Watched(poison, limit)
        self.critic, self.slow = (nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)).double() for _ in range(2))
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), lr=0.1)
        parameters = [*model.parameters(), *loss.parameters()]
        super().__init__(model, loss, torch.optim.SGD(parameters, lr=0.1, momentum=0.9), **kwargs)
        self.progress_of_steps = Progress()
        self.register_for_checkpointing("steps", self.progress_of_steps)

    def calculate_train_batch_loss(self, batch):
        outputs = self.model(batch[0])
        self.critic(outputs.detach()).square().mean().backward()
        self.critic_optimizer.step()
        self.critic_optimizer.zero_grad()
        self.slow(outputs.detach()).square().mean().backward()
        self.progress_of_steps.step += 1
        return {"loss": self.loss_func(outputs, batch[1]) + self.critic(outputs).mean()}

    def everything(self) -> dict[str, Any]:
        modules = nn.ModuleList([self.model, self.loss_func, self.critic, self.slow])
        gradients = {f"gradient {name}": p.grad for name, p in self.slow.named_parameters()}
        steps = {"steps": torch.tensor(self.progress_of_steps.step)}
        moments = {str(key): state["exp_avg"] for key, state in self.critic_optimizer.state_dict()["state"].items()}
        return weights(modules) | gradients | moments | steps


class FullInEvaluation(nn.Module):
    """Has memory for three samples in evaluation, and keeps the sizes of the batches that fit."""

    def __init__(self, limit: int | None = 3) -> None:
        super().__init__()
        self.inner, self.limit = float64_model(), limit
        self.sizes: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(len(x), 1, dtype=x.dtype)
        if not self.training and self.limit is not None and len(x) > self.limit:
            raise torch.OutOfMemoryError("out of memory")
        self.sizes.append(len(x))
        return self.inner(x) + 0 * noise


ALL_PHASES: Any = ("training", "evaluation", "prediction")
