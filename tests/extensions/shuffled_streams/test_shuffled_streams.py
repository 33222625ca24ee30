"""Streams shuffled in blocks resume within a block, with and without a state of the inner stream."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import TensorDataset

from pytorch_accel_lite.data import ShuffledStream
from tests.small_models import equal_weights, same_bits
from tests.streams import BATCHES, Shelf, require, train_on


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


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shelf", "forgetful", "hugging face"])
def test_a_stream_shuffled_in_blocks_rereads_one_block_at_most(tmp_path, kind):
    require("shelf" if kind == "forgetful" else kind)
    whole = train_on(f"blocks of {kind}", tmp_path)
    numbers = [int(x) for batch in whole["seen"] for x in batch[:, 0]]
    first, second = numbers[:26], numbers[26:]
    assert sorted(first) == sorted(second) == [*range(26)]
    assert first != second != [*range(26)]
    if kind != "hugging face":  # which shuffles its shards, too
        assert [sorted(first[i : i + 7]) for i in (0, 7, 14)] == [[*range(i, i + 7)] for i in (0, 7, 14)]
    for update in (1, 5, BATCHES, BATCHES + 6):
        resumed = train_on(f"blocks of {kind}", resume_from=tmp_path / f"{update}")
        assert same_bits(resumed["seen"], whole["seen"][update:])
        assert equal_weights(resumed["weights"], whole["weights"])
        epoch, step = divmod(update - 1, BATCHES)
        given = min(3 * (step + 1), 26)
        before = (given - 1) // 7 * 7 if kind != "forgetful" else 0  # samples of the blocks before
        assert len(resumed["read"]) == 26 * (2 - epoch) - before
