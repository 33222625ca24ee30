"""Streams that are shuffled block by block."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import TensorDataset

from pytorch_accel_lite.data import ShuffledStream
from tests.streams import Shelf


def given(stream):
    return [int(sample[0]) for sample in stream]


def test_a_stream_may_report_a_state_that_it_changes_later():
    class Live(Shelf):
        next = property(lambda self: self.state["next"], lambda self, value: self.state.update(next=value))

        def __init__(self, numbers):
            self.state = {}
            super().__init__(numbers)

        def state_dict(self):
            return self.state

    whole = given(ShuffledStream(Live(range(12)), 4))
    stream, again = (ShuffledStream(Live(range(12)), 4) for _ in range(2))
    reader = iter(stream)
    assert [int(next(reader)[0]) for _ in range(6)] == whole[:6]
    again.load_state_dict(stream.state_dict())
    assert given(again) == whole[6:]


@pytest.mark.parametrize(
    ("stream", "kwargs", "error", "message"),
    [
        (TensorDataset(torch.zeros(1)), {}, TypeError, "must be an IterableDataset, not TensorDataset"),
        (Shelf(()), {"block_size": 0}, ValueError, "block_size=0 must be at least 1"),
    ],
)
def test_shuffling_refuses_other_data_and_bad_blocks(stream, kwargs, error, message):
    with pytest.raises(error, match=message):
        ShuffledStream(stream, **kwargs)
