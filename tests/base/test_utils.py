"""Helpers of utils, of texts and of trainers on one process; of several: distributed/test_communication.py."""

from __future__ import annotations

import pytest
import torch

from pytorch_accel_lite.extension_tools.texts_and_pages import format_duration
from pytorch_accel_lite.utils import remove_padding
from tests.small_models import make_trainer


@pytest.mark.parametrize(
    ("padded", "value", "expected"),
    [
        ([1, -1, 2, -1], -1, [1, 2]),
        ([[1, 0], [0, 0], [0, 3]], 0, [[1, 0], [0, 3]]),
        ([[[0.0], [0.0]], [[1.0], [0.0]]], 0, [[[1.0], [0.0]]]),
        ([1.0, float("nan")], float("nan"), [1.0]),
        ([1, 2], 0, [1, 2]),
    ],
)
def test_padding_is_removed(padded, value, expected):
    assert torch.equal(remove_padding(torch.tensor(padded), value), torch.tensor(expected))


def test_helpers_of_the_trainer_on_one_process():
    trainer = make_trainer()
    trainer.barrier()
    assert trainer.broadcast_object("x") == "x"
    assert trainer.all_gather_object("x") == ["x"]
    rows = torch.tensor([[1.0, 2.0]])
    assert trainer.gather(rows) is trainer.gather(rows, with_gradients=True) is rows
    with pytest.raises(ValueError, match=r"source=1 must be a rank of the job: 0 to 0\."):
        trainer.broadcast_object("x", source=1)


ELEMENTS = torch.tensor([[1.0, 2.0], [3.0, 6.0]])


@pytest.mark.parametrize("reduce", [None, "sum", "mean", "max", "min"])
def test_tensor_to_numeric_of_one_element_is_a_number(reduce):
    assert make_trainer().tensor_to_numeric(torch.tensor([[3]]), reduce) == 3


def test_tensor_to_numeric_reduces_all_elements():
    to_numeric = make_trainer().tensor_to_numeric
    assert isinstance(to_numeric(torch.tensor(3), "sum"), int)
    assert to_numeric(ELEMENTS) == [[1, 2], [3, 6]]
    assert [to_numeric(ELEMENTS, reduce) for reduce in ("sum", "mean", "max", "min")] == [12, 3, 6, 1]
    assert to_numeric({"a": [ELEMENTS, torch.tensor(True)]}, "max") == {"a": [6, True]}
    assert (to_numeric(torch.ones(0)), to_numeric(torch.ones(0), "sum")) == ([], 0)


@pytest.mark.parametrize(
    ("tensors", "reduce", "message"),
    [
        pytest.param(2.0, None, "must be a tensor, or nested lists", id="number"),
        pytest.param([torch.ones(2), "x"], None, "must be a tensor, or nested lists", id="text"),
        pytest.param(torch.ones(0), "max", "no max of tensors without elements", id="nothing"),
        pytest.param(ELEMENTS, "median", "reduce='median' must be None, 'sum'", id="median"),
    ],
)
def test_tensor_to_numeric_refuses_what_it_cannot_reduce(tensors, reduce, message):
    with pytest.raises(ValueError, match=message):
        make_trainer().tensor_to_numeric(tensors, reduce)


def test_gather_leaves_out_rows_that_are_padding():
    trainer = make_trainer()
    assert trainer.gather(torch.tensor([-1] * 7), padding_value=-1).shape == (0,)
    boxes = {"boxes": torch.tensor([[0.0, -1.0], [-1.0, -1.0]]), "scores": (torch.tensor([0.5, torch.nan]),)}
    kept = trainer.gather(boxes, padding_value=-1)
    assert kept["boxes"].tolist() == [[0.0, -1.0]]
    assert trainer.gather(boxes, padding_value=torch.nan)["scores"][0].tolist() == [0.5]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.416, "0.42s"), (12.34, "12.3s"), (59.96, "1:00"), (245, "4:05"), (7445, "2:04:05")]
)
def test_durations_are_formatted_briefly(seconds, text):
    assert format_duration(seconds) == text
