"""Trainings on numbers with a loader of the user's own, which show how often each sample is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from pytorch_accel_lite import Trainer, TrainerCallback


def numbers(size: int = 16) -> TensorDataset:
    x = torch.arange(float(size))[:, None]
    return TensorDataset(x, x.clone())


class MeanOfTargets(nn.Module):
    """A loss whose mean shows how often each sample was used."""

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return targets.mean() + 0 * outputs.sum()


class Seen(TrainerCallback):
    """Keeps the samples of each epoch."""

    saves_attributes = False  # those of a run alone

    def __init__(self) -> None:
        self.epochs: list[Any] = []

    def on_train_epoch_start(self, trainer, **kwargs):
        self.epochs.append([])

    def on_train_step_end(self, trainer, batch, batch_output, **kwargs):
        if batch_output["batch_size"]:
            self.epochs[-1] += batch[0].flatten().int().tolist()


def trained_on(data: Any, make_loader: Callable[..., Any], num_epochs: int = 2, **kwargs: Any) -> Any:
    """The samples of this process in each epoch and the loss of an evaluation, or the error."""

    class OwnLoader(Trainer):
        def create_train_dataloader(self, batch_size, train_dl_kwargs=None):
            return make_loader(self.train_dataset)

        def create_eval_dataloader(self, batch_size, eval_dl_kwargs=None):
            return make_loader(self.eval_dataset)

    model, seen = nn.Linear(1, 1), Seen()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = OwnLoader(model, MeanOfTargets(), optimizer, callbacks=[seen], **kwargs)
    try:
        trainer.train(data, num_epochs, eval_dataset=data)
    except ValueError as error:
        return str(error)
    return seen.epochs, trainer.run_history.get_latest_metric("eval_loss_epoch")


class Transformed(Dataset[Any]):
    """A dataset of the user's own around another."""

    def __init__(self, data: Any) -> None:
        self.parts = {"of it": data}

    def __len__(self) -> int:
        return len(self.parts["of it"])

    def __getitem__(self, index: int) -> Any:
        return self.parts["of it"][index]


class ReadsAhead(DataLoader[Any]):
    """A subclass with an ``__iter__`` of its own, as for reading in a thread."""

    def __iter__(self):
        return iter(list(super().__iter__()))
