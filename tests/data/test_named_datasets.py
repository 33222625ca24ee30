"""Several datasets by name, in training and evaluation."""

from __future__ import annotations

from collections import UserDict
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, Subset, TensorDataset

from pytorch_accel_lite import Trainer, TrainerCallback
from pytorch_accel_lite.data import NamedDatasets
from tests.loaders import numbers
from tests.small_models import adamw_trainer, float64_data, float64_model, make_trainer


class TwoTasks(Trainer):
    seen: list[Any]

    def calculate_train_batch_loss(self, batch):
        self.seen.append({name: part[0][:, 0].tolist() for name, part in batch.items()})
        losses = {name: self.loss_func(self.model(x), y) for name, (x, y) in batch.items()}
        return {"loss": losses, "batch_size": len(batch["a"][0])}


def tagged(size: int, offset: int) -> TensorDataset:
    column = torch.arange(size, dtype=torch.float64) + offset
    return TensorDataset(column[:, None].expand(-1, 5).contiguous(), float64_data(size).tensors[1])


@pytest.mark.parametrize("seed", [None, 1])
def test_training_datasets_by_name_give_batches_by_name(seed, capsys):
    data = {"a": tagged(6, 0), "b": tagged(10, 100)}
    for dataset, length in ((data, 6), (NamedDatasets(data, length="max"), 10)):
        model = float64_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        trainer = TwoTasks(model, nn.MSELoss(), optimizer, callbacks=[], seed=seed)
        trainer.seen = []
        trainer.train(dataset, 2, per_device_batch_size=4, train_dataloader_kwargs={"num_workers": 0})
        assert trainer.progress.samples == 2 * length
        epochs = trainer.seen[: len(trainer.seen) // 2], trainer.seen[len(trainer.seen) // 2 :]
        for epoch in epochs:
            first = [sample for batch in epoch for sample in batch["a"]]
            second = [sample for batch in epoch for sample in batch["b"]]
            assert len(first) == len(second) == length
            assert set(first[:6]) == set(range(6))
            assert set(first[6:]) < set(range(6))
            assert len(set(second)) == length
            assert set(second) <= set(range(100, 110))
        assert epochs[0] != epochs[1]
        assert {"train_a_epoch", "train_b_epoch"} <= set(trainer.run_history.get_metric_names())
    start = "The datasets differ in length ('a' 6, 'b' 10): an epoch is as long as the "
    assert capsys.readouterr().out.splitlines() == [
        f"{start}shortest, 'a'; of the others, as many samples are used, drawn again in each epoch.",
        f"{start}longest, 'b'; the others are repeated.",
    ]


def test_datasets_by_name_in_order_use_the_first_samples(capsys):
    data = {"a": tagged(6, 0), "b": tagged(10, 100)}
    model = float64_model()
    trainer = TwoTasks(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.0), callbacks=[])
    trainer.seen = []
    in_order = {"shuffle": False, "num_workers": 0}
    trainer.train(data, 1, per_device_batch_size=4, train_dataloader_kwargs=in_order)
    assert "as many samples are used, the first ones." in capsys.readouterr().out
    same_length = {"a": data["a"], "b": tagged(6, 100)}
    trainer.train(same_length, 1, per_device_batch_size=4, train_dataloader_kwargs=in_order)
    assert capsys.readouterr().out == ""


def test_datasets_by_name_in_order():
    sampler_order = []
    trainer = adamw_trainer(float64_model())
    data = NamedDatasets({"a": tagged(2, 0), "b": tagged(3, 100)}, length="max")

    class Keep(TrainerCallback):
        def on_train_step_end(self, trainer, batch, **kwargs):
            sampler_order.extend(zip(batch["a"][0][:, 0].tolist(), batch["b"][0][:, 0].tolist(), strict=True))

    class Sum(Trainer):
        def calculate_train_batch_loss(self, batch):
            return {"loss": self.model(batch["a"][0]).mean(), "batch_size": len(batch["a"][0])}

    trainer = make_trainer([Keep], float64_model(), Sum, loss_func=None)
    trainer.train(data, 1, per_device_batch_size=2, train_dataloader_kwargs={"shuffle": False})
    assert sampler_order == [(0, 100), (1, 101), (0, 102)]


@pytest.mark.parametrize("indices", [range(5), np.arange(5), torch.arange(5)])
def test_datasets_by_name_take_indices_of_any_kind(indices):
    data = Subset(NamedDatasets({"a": numbers(5), "b": numbers(3)}, length="max"), indices)
    assert [(sample["a"][0].item(), sample["b"][0].item()) for sample in (data[3], data[4])] == [(3, 0), (4, 1)]


def test_evaluation_datasets_by_name_are_evaluated_one_by_one():
    trainer = adamw_trainer(float64_model())
    clean, noisy = float64_data(9), float64_data(20)
    trainer.train(clean, 2, {"clean": clean, "noisy": noisy})
    history = trainer.run_history.to_dict()
    assert {name: len(values) for name, values in history.items()} == {
        "train_loss_epoch": 2,
        "clean_eval_loss_epoch": 2,
        "noisy_eval_loss_epoch": 2,
    }
    metrics = trainer.evaluate({"clean": clean, "noisy": noisy})
    assert metrics.keys() == {"clean_evaluation_loss", "noisy_evaluation_loss"}
    assert metrics["clean_evaluation_loss"] == pytest.approx(trainer.evaluate(clean)["evaluation_loss"], abs=1e-12)
    assert metrics["clean_evaluation_loss"] == pytest.approx(history["clean_eval_loss_epoch"][-1], abs=1e-12)


def test_a_sampler_of_datasets_by_name_orders_them():
    read = []
    model = float64_model()

    class Sum(Trainer):
        def calculate_train_batch_loss(self, batch):
            read.extend(batch["a"][0][:, 0].tolist())
            return {"loss": self.model(batch["a"][0]).mean(), "batch_size": len(batch["a"][0])}

    trainer = make_trainer((), model, Sum, loss_func=None)
    data = {"a": tagged(4, 0), "b": tagged(4, 100)}
    trainer.train(data, 1, per_device_batch_size=2, train_dataloader_kwargs={"sampler": [3, 1], "shuffle": False})
    assert read == [3, 1]


@pytest.mark.parametrize("kind", [MappingProxyType, UserDict])
def test_any_mapping_of_names_has_datasets_by_name(kind):
    data, doubled = float64_data(9), tagged(12, 0)
    trainer = adamw_trainer(float64_model())
    trainer.train(data, 1, kind({"clean": data, "doubled": doubled}))
    assert {"clean_eval_loss_epoch", "doubled_eval_loss_epoch"} < set(trainer.run_history.get_metric_names())
    assert trainer.eval_dataset == {"clean": data, "doubled": doubled}
    assert trainer.evaluate(kind({"clean": data})) == trainer.evaluate({"clean": data})
    with pytest.raises(TypeError, match="predict takes one dataset, not a dict of \\['clean'\\]"):
        trainer.predict(kind({"clean": data}))
    model = float64_model()
    tasks = TwoTasks(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.0), callbacks=[])
    tasks.seen = []
    tasks.train(kind({"a": tagged(6, 0), "b": tagged(6, 100)}), 1, train_dataloader_kwargs={"num_workers": 0})
    assert tasks.seen[0].keys() == {"a", "b"}


def test_a_mapping_of_indices_is_one_dataset():
    data = float64_data(9)
    expected = adamw_trainer(float64_model()).evaluate(data)
    assert adamw_trainer(float64_model()).evaluate(UserDict(enumerate(data))) == expected


def test_a_dataset_that_is_a_mapping_is_one_dataset():
    class ByName(UserDict[str, Any], Dataset[Any]):
        def __getitem__(self, index):
            return super().__getitem__(str(index))

    data = float64_data(9)
    named = ByName({str(number): sample for number, sample in enumerate(data)})
    assert adamw_trainer(float64_model()).evaluate(named) == adamw_trainer(float64_model()).evaluate(data)
