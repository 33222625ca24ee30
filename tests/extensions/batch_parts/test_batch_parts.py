"""Batches in parts: the parts, and their outputs merged, are worth the whole. ``failed_batches`` trains on parts."""

from __future__ import annotations

import math
from collections import UserDict

import pytest
import torch

from pytorch_accel_lite.data import Batch
from pytorch_accel_lite.extensions.batch_parts import as_returned, merge_outputs, split_into_parts
from tests.small_models import listener, make_trainer

WHOLE = Batch((torch.arange(5.0), ["a", "b", "c", "d", "e"]), 5, 5, True, indices=[7, 3, 4, 0, 1])


def test_parts_have_the_samples_of_the_whole():
    parts = split_into_parts(WHOLE, 2)
    assert [part.data[1] for part in parts] == [["a", "b"], ["c", "d", "e"]]
    assert [part.indices for part in parts] == [[7, 3], [4, 0, 1]]
    assert [part.num_samples for part in parts] == [2, 3]
    assert [part.total_samples for part in parts] == [5, 0]  # counted once


class Encoded(UserDict[str, torch.Tensor]):
    """A batch as a tokenizer returns it."""

    def __init__(self, tokens: torch.Tensor, words: list[str]) -> None:
        super().__init__(tokens=tokens)
        self.words = words


class Output(dict[str, torch.Tensor]):
    """As transformers' outputs of models."""

    def update(self, *args: object, **kwargs: object) -> None:
        raise Exception("You cannot use update.")


class SizedOnce(Output):
    """A batch whose tensors must all have one length."""

    def __setitem__(self, key: str, value: torch.Tensor) -> None:
        raise RuntimeError("batch dimension mismatch")


def test_parts_of_a_mapping_are_of_its_class_if_that_allows_it():
    tokens, words = WHOLE.data
    first, second = split_into_parts(WHOLE._replace(data=Encoded(tokens, words)), 2)
    assert isinstance(first.data, Encoded)
    assert torch.equal(torch.cat([first.data["tokens"], second.data["tokens"]]), tokens)
    assert first.data.words + second.data.words == words
    for kind in (Output, SizedOnce):
        first, _ = split_into_parts(WHOLE._replace(data=kind(tokens=tokens)), 2)
        assert torch.equal(first.data["tokens"], tokens[:2])
        assert isinstance(first.data, Output) == (kind is Output)


def test_one_part_and_small_fillers_are_left_whole():
    filler = WHOLE._replace(num_samples=0, indices=[])
    assert split_into_parts(WHOLE, 1)[0] is WHOLE
    assert split_into_parts(filler, 3)[0] is filler


def test_only_a_part_of_a_repeated_batch_is_computed():
    (part,) = split_into_parts(WHOLE._replace(num_samples=0, indices=None), 2)
    assert part.is_filler
    assert torch.equal(part.data[0], WHOLE.data[0][:2])


def test_merged_outputs_are_those_of_the_whole():
    x = torch.arange(5.0)
    outputs = [
        {
            "loss": part.mean(),
            "batch_size": len(part),
            "model_outputs": part,
            "losses": {"a": part.mean()},
            "text": None,
        }
        for part in (x[:2], x[2:])
    ]
    merged = merge_outputs(outputs)
    assert merged["batch_size"] == 5
    torch.testing.assert_close(merged["loss"], x.mean())
    torch.testing.assert_close(merged["losses"]["a"], x.mean())
    assert torch.equal(merged["model_outputs"], x)
    assert merged["text"] is None


def test_losses_of_each_sample_are_put_together():
    losses = torch.arange(10.0).reshape(5, 2)
    parts = [losses[:2], losses[2:]]
    merged = merge_outputs([{"loss": p, "losses": {"right": p[:, 0] > 3}, "batch_size": len(p)} for p in parts])
    assert torch.equal(merged["loss"], losses)
    assert merged["losses"]["right"].tolist() == [False, False, True, True, True]
    ragged = [torch.ones(2, 1), torch.zeros(3, 4)]
    merged = merge_outputs([{"loss": loss, "batch_size": len(loss)} for loss in ragged])
    torch.testing.assert_close(merged["loss"], torch.tensor(2 / 5))


@pytest.mark.parametrize("count", [int, float, torch.tensor], ids=["int", "float", "tensor"])
def test_the_mean_of_a_part_without_items_does_not_count(count):
    losses = {0: torch.tensor(math.nan), 3: torch.tensor(1.0)}
    outputs = [
        {"loss": loss, "losses": {"a": loss}, "batch_size": 2, "num_items_in_batch": count(items)}
        for items, loss in losses.items()
    ]
    merged = merge_outputs(outputs)
    assert merged["num_items_in_batch"] == 3
    assert merged["loss"] == merged["losses"]["a"] == 1
    assert merged["loss"].dtype == torch.float32


def test_losses_are_copied_only_if_a_callback_may_change_them():
    output = {"loss": torch.ones(()), "batch_size": 1, "model_outputs": torch.ones(1)}
    assert as_returned(make_trainer(), output) is output
    kept = as_returned(make_trainer([listener(on_backward_start=lambda trainer, **_: None)]), output)
    output["loss"].add_(1)
    assert kept == {"loss": torch.ones(()), "batch_size": 1}
