"""Batches that fail on one rank, or do not fit there."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset

from pytorch_accel_lite import NonFiniteLossError
from pytorch_accel_lite.callbacks import NaNReportCallback, SkipFailedBatchesCallback
from tests.cases.common import IN_ORDER, global_batch, rank, shared_folder, world_size
from tests.cases.training import TokenTrainer
from tests.tasks import quiet_trainer, regression_data, small_model, weights


class Fussy(nn.Module):
    """Refuses, on the last rank, batches with certain samples or more than one sample."""

    def __init__(self, poison: float | None = None, alone: bool = False) -> None:
        super().__init__()
        self.inner = nn.Sequential(small_model(), nn.BatchNorm1d(1, momentum=0.5).double())
        self.poison, self.alone = poison, alone

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner[0](x) if self.alone else self.inner(x)
        if rank() == world_size() - 1 and self.training:
            if self.alone and len(x) > 1:
                raise torch.OutOfMemoryError("out of memory.")
            if self.poison is not None and (x[:, 0] == self.poison).any():
                raise ValueError("cannot digest this")
        return y


def poisoned(size: int) -> TensorDataset:
    """Data in which one sample of the last rank's second batch is poison."""
    data = regression_data(size)
    data.tensors[0][11, 0] = 7.0
    return data


def failed_batches() -> Any:
    """What is left trains as data without the failed batch; with accumulation the windows differ."""
    results = {}
    batches = [[*range(6 * i, 6 * i + 6)] for i in (0, 2, 3)]  # of all ranks, without the second
    for name, accumulation in (("each", 1), ("window", 2)):
        skip = SkipFailedBatchesCallback()
        model = Fussy(poison=7.0)
        trainer = quiet_trainer(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), callbacks=[skip])
        options = {"per_device_batch_size": global_batch(6), "gradient_accumulation_steps": accumulation}
        trainer.train(poisoned(24), 2, train_dataloader_kwargs=IN_ORDER, **options)
        order = [sample for batch in batches for sample in batch]
        unharmed = Fussy()
        data = Subset(poisoned(24), order)
        expected = quiet_trainer(unharmed, optimizer=torch.optim.SGD(unharmed.parameters(), lr=0.1))
        expected.train(data, 2, train_dataloader_kwargs=IN_ORDER, **options)
        results[name] = {
            "failures": skip.failures,
            "progress": trainer.progress.state_dict(),
            "found": weights(model),
            "expected": weights(unharmed),
        }
    return results


def failed_first_batch_of_tokens() -> Any:
    """The last rank fails before it knows how many items it has."""

    class Fails(TokenTrainer):
        fails = True

        def calculate_train_batch_loss(self, batch):
            if self.fails and rank() == world_size() - 1:
                self.fails = False
                raise ValueError("cannot digest this")
            return super().calculate_train_batch_loss(batch)

    x, y = regression_data(24).tensors
    data = TensorDataset(x, y, x[:, :1] > -1)
    results = []
    for trainer_class, part in ((Fails, data), (TokenTrainer, Subset(data, range(6, 24)))):
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = trainer_class(model, None, optimizer, callbacks=[SkipFailedBatchesCallback] * (part is data))
        trainer.train(part, 1, per_device_batch_size=global_batch(6), train_dataloader_kwargs=IN_ORDER)
        results.append(weights(model))
    return results


def nan_report() -> Any:
    """One rank meets a batch that is not finite: it alone writes a report, and all end together."""
    with shared_folder() as folder:
        report = NaNReportCallback(folder / "nan reports")
        data = regression_data(60)
        data.tensors[0][11, 0] = float("nan")
        trainer = quiet_trainer(small_model(), callbacks=[report])
        try:
            trainer.train(data, 1, per_device_batch_size=global_batch(6), train_dataloader_kwargs=IN_ORDER)
        except NonFiniteLossError as error:
            return {"error": str(error), "report": None if report.report is None else report.report.name}


def out_of_memory() -> Any:
    """One rank alone runs out of memory: all split, and the gradients are those of the whole batch."""
    results = {}
    for alone in (True, False):
        model = Fussy(alone=alone)
        model.inner[1] = nn.Identity()
        trainer = quiet_trainer(model)
        trainer.train(
            regression_data(27),
            2,
            per_device_batch_size=global_batch(12),
            gradient_accumulation_steps=2,
            train_dataloader_kwargs=IN_ORDER,
            auto_microbatch=True,
        )
        results["split" if alone else "whole"] = {
            "weights": weights(model),
            "history": trainer.run_history.to_dict(),
            "parts": trainer.num_microbatches,
        }
    return results
