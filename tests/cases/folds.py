"""Cross-validation on several processes."""

from __future__ import annotations

from typing import Any

import torch
from sklearn.model_selection import KFold
from torch import nn

from pytorch_accel_lite import Trainer, cross_validate
from tests.cases.common import shared_folder
from tests.experiment_parts import Net, load_data


def validated() -> tuple[list[dict[str, Any]], list[list[int]], torch.Tensor, torch.Tensor]:
    """The metrics and test indices of each fold, the predictions, and the losses of each sample that follow."""
    torch.manual_seed(0)
    data = load_data(11)

    def make_trainer(folder):
        model = Net()
        return Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.05), (), seed=0)

    with shared_folder() as folder:
        # Without a random_state, each rank would draw another split.
        splitter = KFold(3, shuffle=True)
        result = cross_validate(make_trainer, data, splitter, save_dir=folder / "cv", num_epochs=1)
        again = cross_validate(make_trainer, data, splitter, save_dir=folder / "cv", num_epochs=1, resume=True)
        assert [fold.metrics for fold in again.folds] == [fold.metrics for fold in result.folds]
        predictions = result.predictions
        losses = (predictions - data.tensors[1]).square().flatten()
        return (
            [fold.metrics for fold in result.folds],
            [fold.test_indices for fold in result.folds],
            predictions,
            losses,
        )
