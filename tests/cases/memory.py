"""The memory that a real run takes on each process, counted by the tensors that are alive."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.tuning.live_bytes import LiveBytes
from tests.tasks import listener

BATCH = 64
WIDTH = 32


class Blocks(nn.Module):
    """Some blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3))
        self.head = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Sharding(Trainer):
    """Shards each block, and the model."""

    def parallelize_model(self, mesh: Any) -> None:
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)


def rows(size: int = 4 * BATCH) -> TensorDataset:
    return TensorDataset(torch.randn(size, WIDTH), torch.randn(size, 2 * WIDTH))


def squared(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean squared error. That of torch leaves a number in a storage as large as the outputs."""
    return (outputs - targets).square().mean()


def make_trainer(kind: type[Trainer] = Trainer, model: nn.Module | None = None, **kwargs: Any) -> Trainer:
    torch.manual_seed(0)
    accelerator = kwargs.pop("accelerator", None) or Accelerator(cpu=True)
    optimizer = partial(torch.optim.AdamW, lr=1e-3)
    return kind(model or Blocks(), squared, optimizer, callbacks=[], accelerator=accelerator, **kwargs)


def peak_of_a_run(how: str, **kwargs: Any) -> tuple[int, dict[str, int], str]:
    """The most bytes that are alive in the second update of a real run, what they are, and when."""
    trainer = make_trainer(Sharding if how == "sharded" else Trainer)
    trained: list[Any] = []

    def owners() -> Iterator[tuple[str, Any]]:
        for parameter in trained:
            yield "parameters", parameter
            if parameter.grad is not None:
                yield "gradients", parameter.grad
        for state in trainer.optimizer.state.values() if trained else ():
            yield from (("optimizer", value) for value in state.values())

    live = LiveBytes(trainer.device, owners)
    begin = listener(
        on_training_run_start=lambda *_, **__: trained.extend(trainer.model.parameters()),
        on_update_end=lambda *_, **__: live.forget_peak(),  # without the state of the optimizer in the first
        on_train_step_start=lambda *_, **__: setattr(live, "is_updating", False),
        on_optimizer_step_start=lambda *_, **__: setattr(live, "is_updating", True),
    )
    trainer.callback_handler.add_callback(begin)
    found: list[Any] = []
    end = listener(on_optimizer_step_end=lambda *_, **__: found.append((live.peak, dict(live.at_peak), live.stage)))
    trainer.callback_handler.add_callback(end)
    for parameter in trainer.model.parameters():
        live.note(parameter)
    data = rows(8 * BATCH)
    with live:
        trainer.train(data, max_num_train_steps=2, per_device_batch_size=BATCH, **kwargs)
    return found[-1]
