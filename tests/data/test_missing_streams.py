"""Data that are read in turn without the extension that reads them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from pytorch_accel_lite.data import OwnShard, shard
from pytorch_accel_lite.data.loader_creation import SEQUENTIAL_READER
from tests.loaders import numbers, rank_of
from tests.ranks import OrderedStream
from tests.small_models import make_data, make_trainer, train

SAID = (
    "Reading {} in turn, rather than by index, belongs to the extension 'streams', which is not installed: its folder"
)


@pytest.fixture(autouse=True)
def _without_the_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SEQUENTIAL_READER, "content", None)


@pytest.mark.parametrize(
    ("data", "kind"),
    [(OrderedStream(make_data(8)), "OrderedStream"), (OwnShard([make_data(8)[:]]), "OwnShard")],
    ids=["stream", "own batches"],
)
@pytest.mark.parametrize(("method", "arguments"), [("train", (1,)), ("evaluate", ()), ("predict", ())])
def test_data_read_in_turn_need_the_extension(data, kind, method, arguments):
    trainer = make_trainer()
    with pytest.raises(ValueError, match=SAID.format(kind)):
        getattr(trainer, method)(data, *arguments)
    assert trainer.progress.step == 0
    assert not trainer.is_running


class Backwards(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter([*super().__iter__()][::-1])


@pytest.mark.parametrize("loader", [DataLoader(numbers(4), batch_size=None), Backwards(numbers(4))])
def test_loaders_without_batches_of_indices_need_the_extension(loader):
    with pytest.raises(ValueError, match=SAID.format("TensorDataset")):
        shard(loader, rank_of(0, 1), torch.device("cpu"), seed=0, training=True)


def test_data_that_can_be_indexed_do_not_need_the_extension():
    assert train(make_trainer(), 2).progress.epochs_completed == 2
