"""Datasets of a wrong length or without a sample, and arguments that no loader has: the error names them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from tests.small_models import make_trainer


class Sized(Dataset[Any]):
    """Reports any length, and has a sample that is missing."""

    def __init__(self, length: Any, missing: int = -1) -> None:
        self.length, self.missing = length, missing

    def __len__(self):
        if isinstance(self.length, Exception):
            raise self.length
        return self.length

    def __getitem__(self, index):
        return None if index == self.missing else (torch.ones(1), torch.ones(1))


@pytest.mark.parametrize("length", [-3, 8.0, 10**30, "8"])
def test_an_invalid_dataset_length_is_named(length):
    with pytest.raises((TypeError, ValueError), match=rf"train_dataset: __len__ of Sized returned {length!r}. It must"):
        make_trainer([], nn.Linear(1, 1)).train(Sized(length), 1)


def test_an_error_of_len_names_the_argument():
    with pytest.raises(RuntimeError, match=r"^no index") as caught:
        make_trainer([], nn.Linear(1, 1)).train(Sized(8), 1, eval_dataset=Sized(RuntimeError("no index")))
    assert "raised by __len__ of eval_dataset, a Sized" in caught.value.__notes__


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_of_none_is_named(workers, seed):
    trainer = make_trainer([], nn.Linear(1, 1), seed=seed)
    with pytest.raises(TypeError) as caught:
        trainer.train(Sized(8, missing=5), 1, train_dataloader_kwargs={"num_workers": workers})
    assert any("In reading Sized[5]: this sample is None" in note for note in caught.value.__notes__)


def test_an_argument_that_no_dataloader_has_is_named():
    with pytest.raises(TypeError, match=r"train_dataloader_kwargs has the key 'num_worker', which is not an argument"):
        make_trainer([], nn.Linear(1, 1)).train(Sized(8), 1, train_dataloader_kwargs={"num_worker": 1})
