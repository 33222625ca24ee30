"""Predictions of any structure, in order, on one or several processes."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.data.collected_outputs import concatenate
from tests.launching import run_code, two_are_enough
from tests.ranks import OrderedStream
from tests.small_models import adamw_trainer, float64_data, float64_model, listener, on_one_process


class OfManyKinds(nn.Module):
    """Outputs of several types, without arithmetic whose last bits depend on the size of a batch."""

    def forward(self, x):
        kinds = torch.bfloat16, torch.bool, torch.int64, torch.complex64
        real = x[:, 0]
        return {
            "kinds": tuple((x * 8).to(kind) for kind in kinds),
            "strided": [x.T.contiguous().T, x[:, ::2], x[:, :0]],
            "conjugate": torch.complex(real, real * 2).conj(),
            "sparse": x.relu().to_sparse(),
        }


class OfRaggedSamples(nn.Module):
    def forward(self, x):
        sizes = (x[:, 0].abs() * 5).int().tolist()
        return [
            {"boxes": row.repeat(size, 1), "label": f"of {size}", "of": (size, [row.int()])}
            for row, size in zip(x, sizes, strict=True)
        ]


class WithBoxes(nn.Module):
    """Scores as tensors, and beside them a list with the boxes of each sample: some none."""

    def forward(self, x):
        sizes = (x[:, 0].abs() * 5).int().tolist()
        boxes = [row.repeat(size, 1) for row, size in zip(x, sizes, strict=True)]
        return {"scores": x[:, :2], "found": (x[:, 1], boxes)}


class Draws(nn.Module):
    """Adds random numbers in evaluation mode."""

    def __init__(self):
        super().__init__()
        self.inner = float64_model()

    def forward(self, x):
        return self.inner(x) if self.training else x[:, :1] * 0 + torch.rand(len(x), 1)


def test_a_prediction_within_a_run_draws_its_own_random_numbers():
    data = float64_data(6)
    found = []

    def look(trainer: Any, **kwargs: Any) -> None:
        before = torch.get_rng_state()
        found.extend([trainer.predict(data, 2), torch.cat(list(trainer.predict_iter(data, 2)))])
        assert torch.equal(torch.get_rng_state(), before)

    adamw_trainer(Draws(), callbacks=[listener(on_train_epoch_end=look)]).train(data, 1, None, 3)
    whole, parts = found
    assert len(whole.unique()) == 6
    assert torch.equal(whole, parts)


def predicted_streams() -> Any:
    """Predictions and losses of streams, of full and of incomplete last rounds of batches."""
    results = {}
    for size in range(1, 14):
        trainer, data = adamw_trainer(float64_model()), float64_data(size)
        stream = OrderedStream(data)
        results[size] = {
            "predictions": trainer.predict(stream, per_device_batch_size=2),
            "losses": trainer.evaluate(stream, per_device_batch_size=2),
            "expected": float64_model()(data.tensors[0]).detach(),
            "expected_losses": trainer.evaluate(data, per_device_batch_size=2),
        }
    return results


@pytest.mark.thorough
@pytest.mark.extension("streams")
@two_are_enough
@pytest.mark.processes
def test_streams_are_predicted_in_order_by_several_processes(ranks):
    for result in ranks(predicted_streams):
        for run in result.values():
            torch.testing.assert_close(run["predictions"], run["expected"])
            assert run["losses"] == pytest.approx(run["expected_losses"])


def predict_structures() -> Any:
    class Structured(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(5, 2).double()

        def forward(self, x):
            return {"out": self.linear(x), "pair": (x[:, 0], [x[:, 1:]]), "mean": x.mean()}

    torch.manual_seed(0)
    trainer = Trainer(Structured(), None, None, callbacks=[])
    return trainer.predict(float64_data(7), per_device_batch_size=2)


def test_predictions_keep_their_structure_and_order(ranks):
    one = on_one_process(predict_structures)
    assert one.keys() == {"out", "pair"}  # a mean over the batch is no prediction of a sample
    assert isinstance(one["pair"], tuple)
    for result in ranks(predict_structures):
        assert torch.allclose(result["out"], one["out"], atol=1e-12, rtol=0)
        assert torch.equal(result["pair"][0], one["pair"][0])
        assert torch.equal(result["pair"][1][0], one["pair"][1][0])


def many_kinds_of_predictions() -> Any:
    """Predictions for several sizes of data: of all processes, of the first, and in parts."""
    results = {}
    for model in (OfManyKinds(), OfRaggedSamples(), WithBoxes()):
        trainer = Trainer(model, None, None, callbacks=[])
        for size in (1, 7, 26):
            data = float64_data(size)
            parts = list(trainer.predict_iter(data, 2))
            parts_of_first = list(trainer.predict_iter(data, 2, only_first=True))
            results[type(model).__name__, size] = {
                "all": trainer.predict(data, 2),
                "first": trainer.predict(data, 2, only_first=True),
                "parts": concatenate(parts),
                "parts_of_first": [part is None for part in parts_of_first],
                "num_parts": len(parts),
            }
    return results


@two_are_enough
def test_predictions_of_any_kind_are_those_of_one_process(ranks):
    one = on_one_process(many_kinds_of_predictions)
    for rank, result in enumerate(ranks(many_kinds_of_predictions)):
        for key, found in result.items():
            expected = one[key]["all"]
            assert is_same(found["all"], expected)
            assert is_same(found["parts"], expected)
            assert is_same(found["first"], expected if rank == 0 else None)
            assert found["parts_of_first"] == [rank != 0] * found["num_parts"]


def is_same(found, expected):
    """Whether nested outputs are the same, bit for bit."""
    if isinstance(expected, torch.Tensor):
        same_kind = (found.dtype, found.shape, found.layout) == (expected.dtype, expected.shape, expected.layout)
        return same_kind and torch.equal(found.to_dense(), expected.to_dense())
    if type(found) is not type(expected):
        return False
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(is_same(found[key], expected[key]) for key in expected)
    if isinstance(expected, (list, tuple)):
        return len(found) == len(expected) and all(map(is_same, found, expected))
    return found == expected


@pytest.mark.parametrize("size", [20, 21])
def test_lists_in_dicts_may_have_an_element_for_each_sample(size):
    data = float64_data(size)
    inputs = data.tensors[0]
    predicted = Trainer(WithBoxes(), None, None, callbacks=[]).predict(data, per_device_batch_size=4)
    assert torch.equal(predicted["scores"], inputs[:, :2])
    assert torch.equal(predicted["found"][0], inputs[:, 1])
    expected = WithBoxes()(inputs)["found"][1]
    assert len(expected) == size
    assert all(map(torch.equal, predicted["found"][1], expected))
    assert len(predicted["found"][1]) == size


PREDICTS_MUCH = """
import resource

import torch
from torch.utils.data import TensorDataset

from pytorch_accel_lite import Trainer


class Wide(torch.nn.Linear):
    def forward(self, rows):
        return {"a": rows.repeat(1, 2000), "b": (rows.repeat(1, 2000) + 1,)}


trainer = Trainer(Wide(1, 1), None, None, callbacks=[])
trainer.predict(TensorDataset(torch.ones(64, 1)), 32)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
rows = torch.arange(16_000.0)[:, None]
predicted = trainer.predict(TensorDataset(rows), 32)
taken = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
assert torch.equal(predicted["a"][:, 7:8], rows) and torch.equal(predicted["b"][0][:, 9:10], rows + 1)
print(taken / sum(tensor.nbytes for tensor in (predicted["a"], predicted["b"][0])))
"""


class Texts(IterableDataset[str]):
    def __iter__(self) -> Any:
        return iter("a" * length for length in range(1, 11))


class OfTexts(nn.Module):
    """Takes texts as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 2)

    def forward(self, texts: list[str]) -> Any:
        return {"logits": self.layer(torch.tensor([[float(len(text))] for text in texts]))}


@pytest.mark.extension("streams")
def test_outputs_by_name_of_a_stream_of_texts_are_predicted():
    class Predicts(Trainer):
        def calculate_predict_batch_output(self, batch):
            return self.model(batch)

    model = OfTexts()
    trainer = Predicts(model, None, None, callbacks=[])
    with torch.no_grad():
        expected = model([*Texts()])["logits"]
    assert torch.allclose(trainer.predict(Texts(), 4)["logits"], expected)


@pytest.mark.programs
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss has another unit")
def test_predictions_take_their_memory_once():
    assert float(run_code(PREDICTS_MUCH)) < 1.6  # 2.0 if they were concatenated at the end


def test_predictions_can_be_read_part_by_part():
    trainer = adamw_trainer(float64_model())
    parts = []
    for part in trainer.predict_iter(float64_data(10), per_device_batch_size=4):
        assert not trainer.model.training
        parts.append(part)
    assert [len(part) for part in parts] == [4, 4, 2]
    assert torch.equal(torch.cat(parts), trainer.predict(float64_data(10), per_device_batch_size=4))
    assert trainer.model.training


def test_an_abandoned_prediction_leaves_the_model_unchanged():
    trainer = adamw_trainer(float64_model())
    parts = trainer.predict_iter(float64_data(10), per_device_batch_size=4)
    next(parts)
    parts.close()
    assert trainer.model.training
    trainer.train(float64_data(10), 1)


@pytest.mark.parametrize("convert", [list, np.array])
def test_names_that_a_prediction_leaves_out_are_warned_of(convert):
    class Naming(Trainer):
        def calculate_predict_batch_output(self, batch):
            outputs = self.model(batch[0])
            return {"outputs": outputs, "name": convert([f"{value:.2f}" for value in batch[1][:, 0]]), "cache": [None]}

    model = float64_model()
    trainer = Naming(model, nn.MSELoss(), None, callbacks=[])
    with pytest.warns(UserWarning, match="predict leaves out 'name': in a dict of outputs, only tensors") as caught:
        assert trainer.predict(float64_data(20)).keys() == {"outputs"}
    assert len(caught) == 1


@pytest.mark.parametrize("is_first", [False, True])
def test_outputs_of_only_some_batches_are_named(is_first):
    class Squeezing(Trainer):
        def calculate_predict_batch_output(self, batch):
            outputs = self.model(batch[0])
            of_some = outputs.squeeze() if is_first else outputs.mean() if len(outputs) > 1 else outputs
            return {"outputs": outputs, "score": of_some}

    trainer = Squeezing(float64_model(), nn.MSELoss(), None, callbacks=[])
    with pytest.raises(ValueError, match="predict: only for some batches, the model returned 'score' with a sample"):
        trainer.predict(float64_data(9), 4)  # the last batch has one sample


def test_settings_in_outputs_of_predictions_are_left_out(recwarn):
    class Describing(Trainer):
        def calculate_predict_batch_output(self, batch):
            settings = {"size": (480, 640), "temperature": np.array(0.5), "names": ["cat", "dog"], "version": 3}
            return {"outputs": self.model(batch[0]), **settings}

    trainer = Describing(float64_model(), nn.MSELoss(), None, callbacks=[])
    for size in (1, 4):
        assert trainer.predict(float64_data(9), per_device_batch_size=size).keys() == {"outputs"}
    assert not list(recwarn)
