"""find_lr(), find_batch_size() and diagnose() on several processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pytorch_accel_lite import Trainer, TrainerCallback
from tests.cases.common import IN_ORDER, global_batch, rank, world_size
from tests.tasks import equal, own_clock, quiet_trainer, regression_data, small_model, weights


class NotOnTheLast(nn.Module):
    """Has room for three samples on the last rank."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small_model()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if rank() == world_size() - 1 and len(x) > 3:
            raise MemoryError
        return self.inner(x)


def finding() -> Any:
    data = regression_data(24)
    model, alone = NotOnTheLast(), small_model()
    before = weights(model)
    trainer = quiet_trainer(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    batch = trainer.find_batch_size(data)
    found = trainer.find_lr(data, global_batch(6), 1e-3, 0.1, 12, train_dataloader_kwargs=IN_ORDER)
    optimizer, losses = torch.optim.SGD(alone.parameters(), lr=0.1), []
    for step, lr in enumerate(found.lrs):  # the same by hand, with the batches of all ranks together
        x, y = (tensor[6 * (step % 4) : 6 * (step % 4) + 6] for tensor in data.tensors)
        optimizer.param_groups[0]["lr"] = lr
        loss = nn.functional.mse_loss(alone(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {
        "batch": batch,
        "lr": found.suggestion,
        "losses": found.losses,
        "alone": losses,
        "unchanged": equal(weights(model), before),
    }


class SlowOnTheLast(nn.Module):
    """Takes long on the last rank alone, by a clock that stands still otherwise."""

    def __init__(self, spend: Callable[[float], None]) -> None:
        super().__init__()
        self.inner, self.spend = small_model(), spend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.spend(0.02 if rank() == world_size() - 1 else 1e-5)
        return self.inner(x)


class Speaks(TrainerCallback):
    """Communicates, which a process whose callback fails no longer does."""

    def on_train_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        trainer.barrier()


def diagnosis() -> Any:
    with own_clock() as spend:
        model = SlowOnTheLast(spend)
        before = weights(model)
        found = quiet_trainer(model, callbacks=[Speaks]).diagnose(regression_data(48), num_steps=4)
    unchanged, said = equal(weights(model), before), " ".join(found.advice)
    return {"unchanged": unchanged, "steps": found.steps, "step": found.step, "advice": said}
