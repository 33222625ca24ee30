"""Mixtures of streams: shares, passes, and resuming."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import TensorDataset

from pytorch_accel_lite.data import MixtureStream
from tests.small_models import equal_weights
from tests.streams import Forgetful, Shelf, train_on


def given(stream, count=None):
    reader = iter(stream)
    return [int(sample[0]) for sample, _ in zip(reader, range(count or 1000), strict=False)]


def test_streams_are_mixed_evenly_and_repeated():
    mixed = MixtureStream({"a": Shelf(range(3)), "b": Shelf(range(10, 30))}, {"a": 0.5, "b": 1.5})
    assert given(mixed, 16) == [10, 0, 11, 12, 13, 1, 14, 15, 16, 2, 17, 18, 19, 0, 20, 21]
    assert given(mixed, 4) == [10, 0, 11, 12]


def test_an_epoch_may_end_with_the_first_stream_that_ends():
    mixed = MixtureStream({"a": Shelf(range(3)), "b": Shelf(range(10, 30))}, repeat=False)
    assert given(mixed) == [0, 10, 1, 11, 2, 12]


def test_a_mixture_that_has_ended_has_nothing_left_to_resume():
    def create():
        return MixtureStream({"a": Shelf(range(3)), "b": Shelf(range(10, 30))}, repeat=False)

    mixed, again = create(), create()
    assert len(given(mixed)) == 6
    again.load_state_dict(mixed.state_dict())
    assert given(again) == []


def test_each_pass_over_a_stream_calls_set_epoch():
    class Told(Shelf):
        epoch = 0

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            return iter([torch.tensor([self.epoch])] * 2)

    mixed = MixtureStream({"a": Told(())})
    assert given(mixed, 5) == [0, 0, 1, 1, 2]
    mixed.set_epoch(4)
    assert given(mixed, 3) == [4, 4, 5]


def test_a_mixture_of_streams_resumes_to_the_same_bits(tmp_path):
    """A stream with a state is not read again; one without is reread up to its position."""
    whole = train_on("mixture", tmp_path)
    for update in (1, 7, 13):
        resumed = train_on("mixture", resume_from=tmp_path / f"{update}")
        assert equal_weights(resumed["weights"], whole["weights"])
        assert all(map(torch.equal, resumed["seen"], whole["seen"][update:]))
        assert [x for x in resumed["read"] if x < 100] == [x % 26 for x in range(2 * update, 30)]  # a batch ahead
        first = [x for x in resumed["read"] if x >= 100]
        assert first == [100 + x % 5 for x in range(update // 5 * 5, 15)]


def test_shuffle_buffers_in_a_mixture_are_filled_again(tmp_path):
    pytest.importorskip("datasets")
    whole = train_on("mixture of shuffled", tmp_path, size=12)
    resumed = train_on("mixture of shuffled", resume_from=tmp_path / "3", size=12)
    assert all(map(torch.equal, resumed["seen"], whole["seen"][3:]))
    assert equal_weights(resumed["weights"], whole["weights"])


def test_a_stream_under_two_names_is_an_error():
    stream = Shelf(range(3))
    with pytest.raises(ValueError, match="only one position"):
        MixtureStream({"a": stream, "b": stream})


@pytest.mark.processes
def test_a_mixture_of_streams_continues_on_other_processes(two_ranks, tmp_path):
    whole = train_on("mixture", tmp_path, batch_size=6)
    resumed = two_ranks.run(train_on, "mixture", resume_from=tmp_path / "5", batch_size=3)
    for step, expected in enumerate(whole["seen"][5:]):
        assert torch.equal(torch.cat([result["seen"][step] for result in resumed])[:, 0], expected[:, 0])


ROWS = TensorDataset(torch.zeros(1))
BAD_STREAMS = [
    ({}, {}, ValueError, "must have at least one"),
    ([Shelf(())], {}, TypeError, "must be in a dict by name, not list"),
    ({"a": ROWS}, {}, TypeError, "'a' .* is not an IterableDataset.* with Mixture"),
    ({"a": Shelf(())}, {"weights": {"b": 1}}, ValueError, "'b', which is not one of the datasets 'a'"),
]


@pytest.mark.parametrize(("streams", "kwargs", "error", "message"), BAD_STREAMS)
def test_streams_refuse_bad_weights(streams, kwargs, error, message):
    with pytest.raises(error, match=message):
        MixtureStream(streams, **kwargs)


def test_streams_that_give_nothing_are_errors():
    with pytest.raises(ValueError, match=r"The stream 'b' is empty\."):
        given(MixtureStream({"a": Shelf(range(3)), "b": Forgetful(())}))

    class Once(Shelf):
        def __iter__(self):
            return self.reader

    once = Once(())
    once.reader = iter(torch.ones(3, 1))
    with pytest.raises(ValueError, match="'a' is empty, or cannot be read more than once: pass repeat=False"):
        given(MixtureStream({"a": once}))


def test_the_state_of_other_streams_is_refused(tmp_path):
    train_on("mixture", tmp_path)
    with pytest.raises(ValueError, match=r"does not fit .* it holds the streams \['shelf', 'forgetful'\] instead of"):
        train_on("mixture of others", resume_from=tmp_path / "3")
