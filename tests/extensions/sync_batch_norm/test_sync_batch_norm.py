"""Synchronised batch norm: the same parameters and results, and unsupported modules."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accel_lite.callbacks import ConvertSyncBatchNormCallback
from pytorch_accel_lite.extensions.sync_batch_norm import synchronised
from tests.launching import two_are_enough
from tests.ranks import IN_ORDER
from tests.small_models import adamw_trainer, equal_weights, float64_data, make_data, make_trainer, train, weights


class TwoOfOne(nn.Module):
    """One batch norm in two places, and in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4, eps=0.1, momentum=0.3)
        self.layers = nn.ModuleList([nn.Linear(4, 4), self.norm, nn.BatchNorm1d(4, affine=False).eval()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def trained(model: nn.Module) -> nn.Module:
    for seed in range(3):
        model(torch.randn(8, 4, generator=torch.Generator().manual_seed(seed)))
    return model


def test_conversion_to_sync_batch_norm_keeps_model_and_results():
    model = trained(TwoOfOne())
    plain, parameters, buffers = copy.deepcopy(model), list(model.parameters()), list(model.buffers())
    assert synchronised(model) is model
    assert type(model.norm) is type(model.layers[2]) is nn.SyncBatchNorm
    assert model.norm.training == plain.norm.training
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert all(a is b for a, b in zip(model.buffers(), buffers, strict=True))
    assert equal_weights(weights(model), weights(plain))
    x = make_data().tensors[0]
    assert torch.equal(model.eval()(x), plain.eval()(x))


def test_a_model_that_is_a_batch_norm_is_replaced():
    model = trained(nn.BatchNorm1d(4)).eval()
    converted = synchronised(model)
    assert type(converted) is nn.SyncBatchNorm
    assert converted.weight is model.weight


def test_a_batch_norm_with_a_forward_pass_of_its_own_is_refused():
    class WithActivation(nn.BatchNorm1d):
        def forward(self, x):
            return super().forward(x).relu()

    with pytest.raises(ValueError, match=r"WithActivation has its own forward pass.*Convert the model"):
        synchronised(nn.Sequential(nn.BatchNorm1d(4), WithActivation(4)))


def test_one_process_keeps_plain_batch_norm():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    train(make_trainer([ConvertSyncBatchNormCallback], model), eval_dataset=True)
    assert type(model[1]) is nn.BatchNorm1d


def sync_batch_norm() -> Any:
    """On the CPU the conversion is refused with a warning, and training goes on; a converted model can be evaluated."""
    found: dict[str, Any] = {}
    for name, callbacks in (("with", [ConvertSyncBatchNormCallback]), ("without", [])):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)).double()
        trainer = adamw_trainer(model, callbacks=callbacks)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.train(float64_data(24), 1, per_device_batch_size=4, train_dataloader_kwargs=IN_ORDER)
        found[name] = weights(model)
        found[f"warnings {name}"] = [str(w.message) for w in caught if "SyncBatchNorm" in str(w.message)]
    plain = trainer.evaluate(float64_data(9))["evaluation_loss"]
    trainer.model = synchronised(trainer.model)
    return found | {"losses": (plain, trainer.evaluate(float64_data(9))["evaluation_loss"])}


@two_are_enough
def test_batch_norm_on_an_unsupported_device_stays_with_warning(ranks):
    for result in ranks(sync_batch_norm):
        warned = ["cannot synchronise batch norm on 'cpu'" in text for text in result["warnings with"]]
        assert warned == ([True] if result is ranks(sync_batch_norm)[0] else [])
        assert result["warnings without"] == []
        assert equal_weights(result["with"], result["without"])
        plain, converted = result["losses"]
        assert plain == converted
