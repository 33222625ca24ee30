"""Search on several processes."""

from __future__ import annotations

import optuna
import torch
from torch import nn

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.experiment import OptunaPruningCallback, suggest_overrides
from tests.cases.common import rank
from tests.experiment_parts import Net, load_data


class PruneAt(optuna.pruners.BasePruner):
    """Prunes every trial after an epoch."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def prune(self, study, trial):
        return trial.last_step >= self.epoch


def pruned() -> tuple[bool, int, str | None]:
    """Whether a rank was told that the trial is pruned, how far it came, and why it stopped."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    trial = optuna.create_study(pruner=PruneAt(2)).ask() if rank() == 0 else None
    model = Net()
    pruning = OptunaPruningCallback(trial)
    trainer = Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), [pruning], seed=0)
    trainer.train(load_data(), 5, load_data(8), per_device_batch_size=4)
    return pruning.is_pruned, trainer.progress.epoch, trainer.stop_reason


def suggested() -> dict[str, float]:
    """The overrides that a rank gets."""
    trial = optuna.create_study().ask() if rank() == 0 else None
    return suggest_overrides(trial, {"optimizer.lr": {"low": 0.1, "high": 1.0}}, "runs")
