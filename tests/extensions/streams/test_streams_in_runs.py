"""Runs on streams and on ready batches: how they are read, and what is refused or warned of."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.data import OwnShard
from tests.small_models import Stream, float64_data, float64_model, make_data, make_trainer, train


def test_any_iterable_of_batches_is_read():
    x, y = float64_data(9).tensors

    class Own(Trainer):
        def create_train_dataloader(self, batch_size, train_dl_kwargs=None):
            return [(x[:4], y[:4]), (x[4:6], y[4:6]), (x[6:], y[6:])]

        create_eval_dataloader = create_train_dataloader

    model = float64_model()
    trainer = Own(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.0), callbacks=[])
    trainer.train(x, 2, x, gradient_accumulation_steps=2)
    assert trainer.progress.update == 4
    expected = nn.functional.mse_loss(model(x), y).item()
    for name in ("train_loss_epoch", "eval_loss_epoch"):
        assert trainer.run_history.get_metric_values(name) == pytest.approx([expected] * 2, abs=1e-12)


class Wrapped:
    """A loader of the user's own around a stream."""

    dataset = Stream()

    def __len__(self):
        return 3

    def __iter__(self):
        yield from DataLoader(self.dataset, 2)


@pytest.mark.parametrize("pass_it", [OwnShard, lambda loader: loader])
def test_an_own_loader_of_a_stream_needs_no_attributes(pass_it):
    trainer = make_trainer()
    trainer.create_train_dataloader = lambda *_: pass_it(Wrapped())
    trainer.train(make_data(), 2)
    assert trainer.progress.update == 6


def test_the_sizes_of_own_batches_are_unknown():
    trainer = make_trainer()
    trainer.train(OwnShard([make_data(3)[:]]), 1)
    assert trainer.train_dataloader.total_batch_size is None
    assert trainer.train_dataloader.total_dataset_length is None


@pytest.mark.parametrize(("method", "arguments"), [("train", (1,)), ("evaluate", ()), ("predict", ())])
def test_a_stream_without_samples_is_refused(method, arguments):
    trainer = make_trainer()
    with pytest.raises(ValueError, match=r"dataset.*(no batch|empty)"):
        getattr(trainer, method)(Stream(0), *arguments)
    assert trainer.progress.update == 0
    assert trainer.run_history.to_dict() == {}


def test_an_empty_evaluation_is_an_error_that_names_it():
    with pytest.raises(ValueError, match="eval_dataset gave no batch"):
        train(make_trainer(), eval_dataset=Stream(0))
    with pytest.raises(ValueError, match=r"^dataset gave no batch"):
        make_trainer().evaluate(Stream(0))


def test_an_error_in_a_stream_keeps_its_traceback():
    class BrokenStream(Stream):
        def __iter__(self):
            yield self.data[0]
            raise OSError("the line was cut")

    with pytest.raises(OSError, match="the line was cut") as caught:
        train(make_trainer(), train_dataset=BrokenStream(), train_dataloader_kwargs={})
    assert 'raise OSError("the line was cut")' in "".join(traceback.format_exception(caught.value))


class Words(IterableDataset[str]):
    """A stream of samples without a tensor."""

    def __iter__(self) -> Any:
        return iter("ab")


def test_samples_without_a_size_are_refused():
    class AnyBatch(Trainer):
        def calculate_eval_batch_loss(self, batch):
            return {"loss": torch.zeros(())}

    with pytest.raises(ValueError, match=r"batch size cannot be determined .* Return 'batch_size'"):
        AnyBatch(float64_model(), None, None, callbacks=[]).evaluate(Words())


def test_single_samples_of_a_loader_without_batches_are_named():
    data = [(torch.ones(3), torch.ones(1))] * 4
    with pytest.warns(UserWarning, match=r"batch_size=None .* its 3 features would be counted as samples"):
        make_trainer([], nn.Linear(3, 1)).train(DataLoader(data, batch_size=None), 1)
    batches = [(torch.ones(3, 1), torch.ones(3, 1))] * 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_trainer([], nn.Linear(1, 1)).train(DataLoader(batches, batch_size=None), 1)


class Read(IterableDataset[Any]):
    """Reads samples in workers: all of them in each, or the part of each."""

    def __init__(self, x: torch.Tensor, divides: bool) -> None:
        self.samples = TensorDataset(x, x.sum(1, keepdim=True))
        self.divides = divides

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        return iter([*self.samples][worker.id :: worker.num_workers] if self.divides else [*self.samples])


@pytest.mark.parametrize(
    ("stream", "warns"),
    [
        (Read(torch.randn(8, 4), divides=False), True),
        (Read(torch.randn(8, 4), divides=True), False),
        (Read(torch.ones(8, 4), divides=False), False),  # cannot be told
    ],
)
def test_workers_that_each_read_a_whole_stream_are_warned_of(stream, warns):
    with pytest.warns(UserWarning, match="Read gives the same batch to two workers") if warns else nullcontext():
        train(make_trainer(), train_dataset=stream, train_dataloader_kwargs={"num_workers": 2})
