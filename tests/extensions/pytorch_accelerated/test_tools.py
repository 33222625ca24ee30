"""Slices of loaders, and functions that one process runs: on one process; on several, tests/distributed/."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.utils import (
    DataLoaderSlice,
    local_process_zero_first,
    local_process_zero_only,
    world_process_zero_only,
)
from tests.small_models import Stream, make_trainer, train


def test_a_slice_of_a_dataloader_restarts_each_time():
    loader = DataLoader(range(10), batch_size=2)
    first = DataLoaderSlice(loader, 3)
    assert len(first) == 3
    assert [batch.tolist() for batch in first] == [batch.tolist() for batch in first] == [[0, 1], [2, 3], [4, 5]]
    assert len(DataLoaderSlice(loader, 9)) == len(list(DataLoaderSlice(loader, 9))) == 5
    assert len(DataLoaderSlice(iter([1]), 2)) == 2
    with pytest.raises(ValueError, match="slice_size=0 must be at least 1"):
        DataLoaderSlice(loader, 0)


@pytest.mark.extension("streams")
@pytest.mark.parametrize("dataset", [None, Stream(6)])
def test_a_trainer_trains_on_a_slice(dataset):
    class Sliced(Trainer):
        def create_train_dataloader(self, batch_size, train_dl_kwargs=None):
            return DataLoaderSlice(super().create_train_dataloader(batch_size, train_dl_kwargs), 2)

    kwargs = {} if dataset is None else {"train_dataset": dataset, "train_dataloader_kwargs": {}}
    trainer = train(make_trainer(trainer_class=Sliced), 2, **kwargs)
    assert (trainer.progress.update, trainer.progress.samples) == (4, 8)


@pytest.mark.parametrize("decorator", [local_process_zero_first, local_process_zero_only, world_process_zero_only])
def test_on_one_process_a_decorator_changes_nothing(decorator):
    @decorator
    def divide(a, b=1):
        """Divide."""
        return a / b

    assert divide(6, b=2) == 3
    assert divide.__doc__ == "Divide."
    with pytest.raises(ZeroDivisionError):
        divide(1, b=0)
