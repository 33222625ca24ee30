"""Invalid arguments of ``evaluate()`` and ``predict()``, and outputs that ``predict()`` cannot return."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from pytorch_accel_lite import Trainer
from tests.refusals import WHOLE
from tests.small_models import make_data, make_trainer

EVALUATE: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "nothing": ({"dataset": None}, ValueError, "dataset=None: pass a dataset"),
    "an empty dataset": ({"dataset": make_data(0)}, ValueError, "dataset is empty: TensorDataset has length 0"),
    "a number": ({"dataset": 5}, TypeError, "^dataset=5 is not a dataset"),
    "arguments beside a DataLoader": (
        {"dataset": DataLoader(make_data())},
        ValueError,
        r"dataloader_kwargs=\{'num_workers': 0\} is for a dataset, but dataset is a loader",
    ),
    "batches of 0": ({"per_device_batch_size": 0}, ValueError, "per_device_batch_size=0 must be at least 1"),
    "batches of 1.5": ({"per_device_batch_size": 1.5}, TypeError, rf"per_device_batch_size=1\.5 {WHOLE}"),
}


@pytest.mark.parametrize("method", ["evaluate", "predict"])
@pytest.mark.parametrize(("arguments", "error", "match"), EVALUATE.values(), ids=EVALUATE.keys())
def test_evaluate_and_predict_refuse_bad_arguments(method, arguments, error, match):
    trainer = make_trainer()
    with pytest.raises(error, match=match):
        getattr(trainer, method)(**({"dataset": make_data(), "dataloader_kwargs": {"num_workers": 0}} | arguments))
    assert trainer.run_history.to_dict() == {}
    assert trainer.predict(make_data(3)).shape == (3, 1)


def test_evaluate_refuses_datasets_without_names():
    with pytest.raises(ValueError, match=r"^dataset has the key 0, but keys name the metrics"):
        make_trainer().evaluate(OrderedDict({"a": make_data(), 0: make_data()}))


PREDICT: dict[str, tuple[Any, type[Exception], str]] = {
    "a number": (
        lambda batch: 3,
        TypeError,
        "predict: the model returned int.*Override calculate_predict_batch_output",
    ),
    "nothing": (lambda batch: None, TypeError, "predict: the model returned NoneType"),
    "a scalar": (lambda batch: torch.tensor(1.0), ValueError, "predict: .*without a sample dimension"),
}


@pytest.mark.parametrize(("output", "error", "match"), PREDICT.values(), ids=PREDICT.keys())
def test_predict_refuses_outputs_that_cannot_be_concatenated(output, error, match):
    trainer_class = type("Own", (Trainer,), {"calculate_predict_batch_output": lambda self, batch: output(batch)})
    with pytest.raises(error, match=match):
        make_trainer(trainer_class=trainer_class).predict(make_data(4), per_device_batch_size=2)


@pytest.mark.parametrize("key", ["shuffle", "drop_last"])
def test_predict_refuses_to_reorder_or_leave_out_samples(key):
    trainer = make_trainer()
    arguments = {"dataset": make_data(5), "per_device_batch_size": 2}
    match = rf"dataloader_kwargs has {key}=True, but predict returns .* for every sample, in the order.*Omit {key}"
    with pytest.raises(ValueError, match=match):
        trainer.predict(**arguments, dataloader_kwargs={key: True})
    with pytest.raises(ValueError, match=match):
        next(trainer.predict_iter(**arguments, dataloader_kwargs={key: True}))
    with pytest.raises(ValueError, match=match.replace("loader_kwargs", "set")):
        trainer.predict(DataLoader(make_data(5), 2, **{key: True}))
    assert torch.equal(trainer.predict(**arguments, dataloader_kwargs={key: False}), trainer.predict(**arguments))


@pytest.mark.parametrize(
    ("key", "options"),
    [
        ("shuffle", {"sampler": SubsetRandomSampler(range(4))}),
        ("shuffle", {"sampler": WeightedRandomSampler([1.0] * 5, 5)}),
        ("shuffle", {"sampler": DistributedSampler(make_data(5), 1, 0)}),
        ("shuffle", {"batch_sampler": BatchSampler(RandomSampler(range(5)), 2, drop_last=False)}),
        ("drop_last", {"batch_sampler": BatchSampler(SequentialSampler(range(5)), 2, drop_last=True)}),
    ],
    ids=["random", "weighted", "distributed", "random batches", "incomplete batch"],
)
def test_predict_refuses_samplers_that_reorder_or_leave_out(key, options):
    with pytest.raises(ValueError, match=f"dataset has {key}=True"):
        make_trainer().predict(DataLoader(make_data(5), **options))


@pytest.mark.filterwarnings("ignore:'set_vital'")
def test_predict_refuses_a_shuffled_stateful_dataloader():
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    data = stateful.StatefulDataLoader(make_data(5), 2, shuffle=True)
    with pytest.raises(ValueError, match="dataset has shuffle=True"):
        make_trainer().predict(data)


def test_predict_follows_samplers_in_order():
    trainer, data = make_trainer(), make_data(5)
    expected = trainer.predict(data)
    in_order = DistributedSampler(data, 1, 0, shuffle=False)
    batches = BatchSampler(SequentialSampler(data), 2, drop_last=False)
    for loader in (DataLoader(data, 2, sampler=in_order), DataLoader(data, batch_sampler=batches)):
        torch.testing.assert_close(trainer.predict(loader), expected)


def test_predict_refuses_outputs_of_unequal_shape():
    class Ragged(Trainer):
        def calculate_predict_batch_output(self, batch):
            return torch.zeros(len(batch[0]), int(batch[0].abs().sum() * 1000) % 97)

    with pytest.raises(ValueError, match=r"predict: outputs of shapes.*Pad them.*calculate_predict_batch_output"):
        make_trainer(trainer_class=Ragged).predict(make_data(6), per_device_batch_size=2)


def test_predictions_without_a_row_for_each_sample_are_named():
    class Mean(nn.Linear):
        def forward(self, x):
            return super().forward(x).mean(0, keepdim=True)

    with pytest.warns(UserWarning, match="The model returned 1 rows for a batch of 4 samples"):
        assert len(make_trainer([], Mean(1, 1)).predict(TensorDataset(torch.ones(10, 1)), 4)) == 3
