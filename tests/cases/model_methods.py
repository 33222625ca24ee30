"""A model that brings the methods of its training and evaluation."""

from __future__ import annotations

import copy
from typing import Any

import torch
from accelerate import PartialState
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import Dataset

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from tests.cases.common import IN_ORDER, shared_folder, world_size

METHODS = {"train": "train_step", "eval": "evaluate_step", "predict": "sample"}


class Net(nn.Module):
    """Calls parts of itself in training, and its forward pass in evaluations."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(3, 6).double()
        self.head = nn.Linear(6, 1).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).tanh())

    def train_step(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        outputs = self.head(self.body(x).tanh())
        return {"loss": nn.functional.mse_loss(outputs, y), "model_outputs": outputs, "size": outputs.square().mean()}

    def evaluate_step(self, y: torch.Tensor, x: torch.Tensor, scale: float = 1.0) -> dict[str, Any]:
        outputs = self(x)
        return {"loss": scale * nn.functional.l1_loss(outputs, y), "logits": outputs}

    def sample(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self(x)

    def whole(self, batch: Any) -> dict[str, Any]:
        x, y = batch if isinstance(batch, list) else (batch["x"], batch["y"])
        return self.train_step(x, y)

    def few(self, x: torch.Tensor, **others: Any) -> dict[str, Any]:
        return self.train_step(x, others["y"])

    def bare(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self(x).mean()


class Named(Dataset[Any]):
    """Samples with names."""

    def __init__(self, size: int = 26) -> None:
        self.x = torch.randn(size, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        self.y = self.x.sin().sum(1, keepdim=True)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"y": self.y[index], "x": self.x[index]}


def make_trainer(model: nn.Module | None = None, methods: Any = METHODS, **kwargs: Any) -> Trainer:
    model = Net() if model is None else model
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    return Trainer(model, None, optimizer, model_methods=methods, **{"callbacks": [], "seed": 0} | kwargs)


def train(trainer: Trainer, **kwargs: Any) -> Trainer:
    data = Named()
    arguments = {"eval_dataset": data, "per_device_batch_size": 6 // world_size(), "train_dataloader_kwargs": IN_ORDER}
    trainer.train(data, 2, **arguments | kwargs)
    return trainer


def trained_and_resumed() -> dict[str, Any]:
    """The weights after a run of windows of two uneven batches, and after one resumed in its middle; its numbers."""

    def run(folder: Any, **kwargs: Any) -> Trainer:
        states = SaveTrainingStateCallback(folder, save_every_n_steps=2, max_checkpoints=None)
        return train(make_trainer(callbacks=[states]), gradient_accumulation_steps=2, **kwargs)

    with shared_folder() as folder:
        trainer = run(folder / "whole")
        state = sorted(path for path in (folder / "whole").iterdir() if path.is_dir())[0]
        resumed = run(folder / "resumed", resume_from=state)
    return {
        "weights": copy.deepcopy(trainer.get_model().state_dict()),
        "resumed": resumed.get_model().state_dict(),
        "history": trainer.run_history.to_dict(),
        "predicted": trainer.predict(Named()),
    }


def sharded() -> list[float]:
    """The losses of a model whose weights are spread over the processes, and whose methods call parts of it."""
    PartialState(cpu=True)
    model = Net()
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size(),)))
    trainer = train(make_trainer(model))
    trainer.predict(Named())
    return trainer.run_history.get_metric_values("train_loss_epoch")
