"""Losses that accept shapes of outputs and targets, but would train something else, or nothing."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from tests.small_models import adamw_trainer, equal_weights, make_trainer, train, weights

N = 6
INPUTS = torch.randn(N, 4)
TARGETS = torch.randn(N, 1)
OF_EACH_ELEMENT = [
    *(nn.MSELoss(), nn.L1Loss(), nn.SmoothL1Loss(), nn.HuberLoss()),
    *(functional.mse_loss, functional.l1_loss, functional.smooth_l1_loss, functional.huber_loss),
    *(nn.PoissonNLLLoss(), nn.KLDivLoss(reduction="sum"), functional.poisson_nll_loss),
    *(partial(functional.kl_div, reduction="sum"), partial(functional.mse_loss, reduction="sum")),
    pytest.param(partial(nn.MSELoss()), id="partial-module"),
]


@pytest.mark.parametrize("loss_func", OF_EACH_ELEMENT)
@pytest.mark.parametrize("start", ["train", "evaluate"])
@pytest.mark.filterwarnings("ignore:loss_func has reduction='sum'")
def test_outputs_and_targets_that_would_broadcast_are_an_error(loss_func, start):
    trainer = make_trainer(loss_func=loss_func)
    before = weights(trainer.model)
    match = (
        r"outputs of shape \(2, 1\) and targets of shape \(2,\) would be broadcast to \(2, 2\).*targets\.unsqueeze\(1\)"
    )
    data = TensorDataset(INPUTS, TARGETS[:, 0])
    call = partial(trainer.train, data, 1) if start == "train" else partial(trainer.evaluate, data)
    with pytest.raises(ValueError, match=match):
        call(per_device_batch_size=2)
    assert equal_weights(weights(trainer.model), before)
    trainer.train(TensorDataset(INPUTS, TARGETS), 1)
    assert trainer.progress.update == 1


def test_targets_in_a_dict_are_checked_too():
    class Named(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    data = [{"x": x, "y": y[0]} for x, y in zip(INPUTS, TARGETS, strict=True)]
    with pytest.raises(ValueError, match=r"would be broadcast to \(2, 2\)"):
        train(make_trainer(model=Named(4, 1)), train_dataset=data)


def test_broadcasting_is_found_after_a_first_batch_of_one_sample():
    batches = DataLoader(TensorDataset(INPUTS, TARGETS[:, 0]), batch_sampler=[[0], [0, 1], [0, 1, 2]])
    trainer = make_trainer()
    with pytest.warns(UserWarning, match="Using a target size"), pytest.raises(ValueError, match=r"\(2, 2\)"):
        trainer.train(batches, 1)
    assert trainer.progress.update == 1


def test_one_target_for_all_outputs_is_left_to_the_loss_function():
    model = nn.Linear(4, 3)
    trainer = adamw_trainer(model)
    with pytest.warns(UserWarning, match="Using a target size"):
        trainer.train(TensorDataset(INPUTS, TARGETS), 1)  # (N, 3) and (N, 1)
    assert trainer.progress.update == 1


@pytest.mark.parametrize("loss_func", [nn.CrossEntropyLoss(), functional.cross_entropy])
def test_cross_entropy_over_a_single_class_is_an_error(loss_func):
    with pytest.raises(ValueError, match=r"single class of outputs of shape \(2, 1\) is always 0.*BCEWithLogitsLoss"):
        train(make_trainer(loss_func=loss_func), train_dataset=TensorDataset(INPUTS, TARGETS.sigmoid()))
