"""Arguments of loaders, loaders of users, and data that cannot be read."""

from __future__ import annotations

import copy

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from pytorch_accel_lite.data import NamedDatasets
from tests.datasets import Endless
from tests.ranks import Recorder
from tests.small_models import Rows, adamw_trainer, float64_data, float64_model, make_trainer, train
from tests.streams import LengthBuckets


def test_the_arguments_of_dataloaders_can_be_overridden():
    class Own(Trainer):
        def get_default_train_dl_kwargs(self, batch_size):
            return super().get_default_train_dl_kwargs(batch_size) | {"num_workers": 0, "drop_last": True}

    trainer = make_trainer(model=float64_model(), trainer_class=Own)
    sampler = WeightedRandomSampler(torch.ones(10), 7)
    trainer.train(Rows(float64_data(10)), 1, per_device_batch_size=3, train_dataloader_kwargs={"sampler": sampler})
    assert trainer.progress.samples == 6
    assert trainer.run_config.train_dl_kwargs["sampler"] is sampler
    assert trainer.train_dataloader.num_workers == 0


def test_default_arguments_that_are_not_returned_are_named():
    class Forgets(Trainer):
        def get_default_eval_dl_kwargs(self, batch_size):
            super().get_default_eval_dl_kwargs(batch_size)["num_workers"] = 2

    with pytest.raises(TypeError, match=r"get_default_eval_dl_kwargs\(\) returned None: return the dict of arguments"):
        make_trainer(trainer_class=Forgets).evaluate(float64_data(4))


@pytest.mark.parametrize("pins", [None, True])
def test_a_run_on_the_cpu_leaves_a_gpu_alone(pins, tmp_path, no_accelerator, monkeypatch):
    """Pinning, or the state of its generator, would take its memory, and fails here, where there is no GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor, device=None: pytest.fail("has been pinned"))
    for data in (float64_data(10), Rows(float64_data(10))):
        for workers in (0, 1):
            arguments = {"num_workers": workers} if pins is None else {"num_workers": workers, "pin_memory": pins}
            states = SaveTrainingStateCallback(tmp_path / f"{len(list(tmp_path.iterdir()))}")
            trainer = make_trainer([states], float64_model(), accelerator=Accelerator(cpu=True), seed=1)
            trainer.train(data, 1, per_device_batch_size=5, train_dataloader_kwargs=arguments)
            assert trainer.progress.samples == 10
            assert trainer.run_config.train_dl_kwargs["pin_memory"] is bool(pins)


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_dataloader_of_an_overridden_method_is_used(seed, accumulation):
    class Own(Trainer):
        def create_train_dataloader(self, batch_size, train_dl_kwargs=None):
            return DataLoader(self.train_dataset, batch_sampler=LengthBuckets())

    recorder = Recorder()
    trainer = make_trainer([recorder], float64_model(), Own, seed=seed)
    trainer.train(float64_data(11), 1, gradient_accumulation_steps=accumulation)
    assert recorder.counts == [3, 1, 2, 4, 1]
    assert trainer.progress.update == -(-5 // accumulation)


@pytest.mark.parametrize("is_loader", [True, False])
def test_a_loader_without_order_is_told_of_the_order(is_loader):
    kwargs = {"num_workers": 2, "in_order": False, "shuffle": False}
    data = Rows(float64_data(6))
    arguments = {"train_dataset": DataLoader(data, 2, **kwargs)} if is_loader else {"train_dataloader_kwargs": kwargs}
    with pytest.warns(UserWarning, match="in_order=False of a DataLoader has no effect"):
        make_trainer(model=float64_model()).train(**({"train_dataset": data, "num_epochs": 1} | arguments))


def test_a_loader_can_be_copied_and_knows_its_device():
    trainer = train(make_trainer())
    again = copy.copy(trainer.train_dataloader)
    assert again.device == trainer.device
    assert again.batch_size == 2
    assert [len(x) for x, _ in again] == [2, 2, 2]


BAD_INPUT = [
    (
        lambda t: t.train({"a": float64_data(4), "b": TensorDataset(torch.empty(0, 1))}, 1),
        r"train_dataset\['b'\] is empty",
    ),
    (lambda t: t.train({}, 1), r"train_dataset={}"),
    (lambda t: t.train({"a": Endless()}, 1), r"The dataset 'a' \(Endless\) cannot be indexed or has no length"),
    (lambda t: t.train(float64_data(4), 1, {"a": TensorDataset(torch.empty(0))}), r"eval_dataset\['a'\] is empty"),
    (lambda t: t.predict({"a": float64_data(4)}), "predict takes one dataset"),
    (lambda t: NamedDatasets({"a": [1]}, length="mean"), "length='mean' must be 'min' or 'max'"),
]


@pytest.mark.parametrize(("provoke", "message"), BAD_INPUT)
def test_data_that_cannot_be_trained_on_are_refused(provoke, message):
    trainer = adamw_trainer(float64_model())
    with pytest.raises(ValueError if "predict" not in message else TypeError, match=message):
        provoke(trainer)
