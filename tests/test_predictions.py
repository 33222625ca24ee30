"""Predictions in shards: those of predict(), of all processes, also after a kill."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.callbacks import PredictionWriterCallback, read_predictions
from pytorch_accel_lite.data.splitting import concatenate
from tests.launching import run_python
from tests.ranks import OrderedStream, shared_folder
from tests.tasks import Stream, alone, listener, make_model, quiet_trainer, regression_data, small_model


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


def predict(folder: Any, data: Any, extra: Any = (), model: nn.Module | None = None, **kwargs: Any) -> list[Any]:
    writer = PredictionWriterCallback(folder, **({"shard_size": 6} | kwargs))
    trainer = quiet_trainer(model or small_model(), callbacks=[writer, *extra])
    return list(trainer.predict_iter(data, per_device_batch_size=4))


def predictions() -> Any:
    with shared_folder() as folder:
        data, directory = regression_data(23), folder / "predictions"
        trainer = quiet_trainer(small_model(), callbacks=[PredictionWriterCallback(directory, shard_size=3)])
        for _ in trainer.predict_iter(data, per_device_batch_size=2):
            pass
        written = read_predictions(directory)
        by_hand = small_model()(data.tensors[0]).detach()
        names = [path.stem.partition("rank")[2] for path in directory.glob("shard-*")]
        return {"equal": bool(torch.allclose(written, by_hand)), "ranks": sorted(set(map(int, names)))}


def test_what_is_read_is_what_predict_returns(tmp_path):
    data = regression_data(21)
    predict(tmp_path, data)
    assert len(list(tmp_path.glob("shard-*"))) == 3
    expected = quiet_trainer(small_model()).predict(data, per_device_batch_size=4)
    assert torch.equal(read_predictions(tmp_path), expected)


def test_structures_are_kept(tmp_path):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = small_model()

        def forward(self, x):
            return {"y": self.inner(x), "twice": (x, self.inner(x) * 2)}

    data = regression_data(9)
    predict(tmp_path, data, model=Two())
    found = read_predictions(tmp_path)
    assert torch.equal(found["twice"][0], data.tensors[0])
    assert torch.equal(found["twice"][1], found["y"] * 2)


def break_off(folder: Any, data: Any, model: nn.Module | None = None) -> None:
    """Predict until the 16 samples of the fourth step have been written."""
    steps = []

    def fail(trainer: Any, **kwargs: Any) -> None:
        steps.append(1)
        if len(steps) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        predict(folder, data, [listener(on_predict_step_end=fail)], model)


def test_a_prediction_that_was_broken_off_continues(tmp_path, capsys):
    data = regression_data(21)
    break_off(tmp_path, data)
    with pytest.raises(ValueError, match=r"^\d+ of 21 predictions are missing in"):
        read_predictions(tmp_path)
    rest = predict(tmp_path, data)
    assert "16 of 21 samples have already been predicted" in capsys.readouterr().out
    assert sum(map(len, rest)) == 5
    expected = quiet_trainer(small_model()).predict(data, per_device_batch_size=4)
    torch.testing.assert_close(read_predictions(tmp_path), expected)
    assert predict(tmp_path, data) == []
    assert sum(map(len, predict(tmp_path, data, overwrite=True))) == 21


@pytest.mark.parametrize("begin", [break_off, predict], ids=["half-written", "finished"])
def test_predictions_of_other_weights_are_replaced(begin, tmp_path, capsys):
    data = regression_data(21)
    begin(tmp_path, data)
    other = small_model(seed=1)
    assert sum(map(len, predict(tmp_path, data, model=other))) == 21
    said = f"{str(tmp_path)!r} contains predictions of other or unknown weights, which are replaced: predicting all 21"
    assert capsys.readouterr().out.splitlines() == [f"{said} samples."]
    assert torch.equal(read_predictions(tmp_path), quiet_trainer(other).predict(data, per_device_batch_size=4))
    assert predict(tmp_path, data, model=other) == []  # they are known now
    assert "unknown weights" not in capsys.readouterr().out


def test_predictions_without_a_record_of_weights_are_replaced(tmp_path, capsys):
    """As version 0.2 has written them."""
    data = regression_data(21)
    break_off(tmp_path, data)
    (tmp_path / "predictions.json").write_text('{"length": 21}')
    assert sum(map(len, predict(tmp_path, data))) == 21
    assert "contains predictions of other or unknown weights, which are replaced" in capsys.readouterr().out


def test_other_buffers_count_as_other_weights(tmp_path, capsys):
    model = nn.Sequential(nn.BatchNorm1d(5), small_model()).double()
    predict(tmp_path, regression_data(9), model=model)
    model[0].running_mean += 1
    assert len(predict(tmp_path, regression_data(9), model=model)) == 3
    assert "unknown weights" in capsys.readouterr().out


class Scales(Trainer):
    """Makes its predictions with a module besides the model."""

    def calculate_predict_batch_output(self, batch: Any) -> Any:
        return self.scale(super().calculate_predict_batch_output(batch))


def test_weights_beside_the_model_count_if_the_trainer_uses_them(tmp_path, capsys):
    data = regression_data(9)

    def predict_with(trainer_class: type[Trainer], seed: int) -> None:
        writer = PredictionWriterCallback(tmp_path / trainer_class.__name__)
        trainer: Any = trainer_class(small_model(), None, None, [writer])
        trainer.scale = small_model(seed, features=1)
        list(trainer.predict_iter(data))

    for trainer_class, counts in ((Scales, True), (Trainer, False)):
        for seed in (0, 1):
            predict_with(trainer_class, seed)
        assert ("unknown weights" in capsys.readouterr().out) == counts


def predicts_into(directory: Path, seed: int) -> Any:
    output = io.StringIO()
    with redirect_stdout(output):
        trainer = quiet_trainer(small_model(seed), callbacks=[PredictionWriterCallback(directory, shard_size=3)])
        parts = list(trainer.predict_iter(regression_data(21), per_device_batch_size=2))
    return {"samples": sum(map(len, parts)), "printed": output.getvalue()}


@pytest.mark.processes
def test_several_processes_replace_predictions_of_other_weights(tmp_path, two_ranks):
    data = regression_data(21)
    break_off(tmp_path, data)
    first, second = two_ranks.run(predicts_into, tmp_path, 1)
    assert first["samples"] == second["samples"] == 21
    assert first["printed"].count("predictions of other or unknown weights, which are replaced") == 1
    assert not second["printed"]
    expected = quiet_trainer(small_model(seed=1)).predict(data, per_device_batch_size=4)
    torch.testing.assert_close(read_predictions(tmp_path), expected)
    assert predict(tmp_path, data, model=small_model(seed=1)) == []  # one process knows them again


class CountedStream(Stream):
    def __len__(self) -> int:
        return len(self.data)


def test_predictions_continue_only_for_matching_data(tmp_path):
    predict(tmp_path, regression_data(9))
    with pytest.raises(ValueError, match="contains predictions for 9 samples, not 10"):
        predict(tmp_path, regression_data(10))
    with pytest.raises(TypeError, match="needs a dataset with a length"):
        predict(tmp_path / "stream", Stream())
    with pytest.raises(TypeError, match="needs a dataset whose samples have indices, not a stream"):
        predict(tmp_path / "counted", CountedStream(), model=make_model())
    with pytest.raises(FileNotFoundError, match="contains no predictions"):
        read_predictions(tmp_path / "none")
    with pytest.raises(ValueError, match="shard_size=0 must be at least 1"):
        PredictionWriterCallback(shard_size=0)


class Draws(nn.Module):
    """Adds random numbers in evaluation mode."""

    def __init__(self):
        super().__init__()
        self.inner = small_model()

    def forward(self, x):
        return self.inner(x) if self.training else x[:, :1] * 0 + torch.rand(len(x), 1)


def test_a_prediction_within_a_run_draws_its_own_random_numbers():
    data = regression_data(6)
    found = []

    def look(trainer: Any, **kwargs: Any) -> None:
        before = torch.get_rng_state()
        found.extend([trainer.predict(data, 2), torch.cat(list(trainer.predict_iter(data, 2)))])
        assert torch.equal(torch.get_rng_state(), before)

    quiet_trainer(Draws(), callbacks=[listener(on_train_epoch_end=look)]).train(data, 1, None, 3)
    whole, parts = found
    assert len(whole.unique()) == 6
    assert torch.equal(whole, parts)


@pytest.mark.processes
def test_several_processes_write_what_one_would(ranks):
    for result in ranks(predictions):
        assert result["equal"]
        assert result["ranks"] == list(range(ranks.world_size))


def predicted_streams() -> Any:
    """Predictions and losses of streams, of full and of incomplete last rounds of batches."""
    results = {}
    for size in range(1, 14):
        trainer, data = quiet_trainer(small_model()), regression_data(size)
        stream = OrderedStream(data)
        results[size] = {
            "predictions": trainer.predict(stream, per_device_batch_size=2),
            "losses": trainer.evaluate(stream, per_device_batch_size=2),
            "expected": small_model()(data.tensors[0]).detach(),
            "expected_losses": trainer.evaluate(data, per_device_batch_size=2),
        }
    return results


@pytest.mark.processes
def test_streams_are_predicted_in_order_by_several_processes(ranks):
    for result in ranks(predicted_streams):
        for run in result.values():
            torch.testing.assert_close(run["predictions"], run["expected"])
            assert run["losses"] == pytest.approx(run["expected_losses"])


def test_what_one_process_alone_had_predicted_is_done_again(tmp_path, capsys):
    data = regression_data(8)
    predict(tmp_path, data, shard_size=100)
    (path,) = tmp_path.glob("shard-*")
    shard = torch.load(path, weights_only=True)
    first_of_two = [0, 1, 4, 5]  # the second process was killed before it wrote any
    torch.save(shard | {"indices": first_of_two, "outputs": shard["outputs"][first_of_two]}, path)
    rest = predict(tmp_path, data)
    assert "2 of 8 samples have already been predicted" in capsys.readouterr().out
    assert sum(map(len, rest)) == 6
    expected = quiet_trainer(small_model()).predict(data, per_device_batch_size=4)
    torch.testing.assert_close(read_predictions(tmp_path), expected)


def predict_structures() -> Any:
    class Structured(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(5, 2).double()

        def forward(self, x):
            return {"out": self.linear(x), "pair": (x[:, 0], [x[:, 1:]]), "mean": x.mean()}

    torch.manual_seed(0)
    trainer = Trainer(Structured(), None, None, callbacks=[])
    return trainer.predict(regression_data(7), per_device_batch_size=2)


def test_predictions_keep_their_structure_and_order(ranks):
    one = alone(predict_structures)
    assert one.keys() == {"out", "pair"}  # a mean over the batch is no prediction of a sample
    assert isinstance(one["pair"], tuple)
    for result in ranks(predict_structures):
        assert torch.allclose(result["out"], one["out"], atol=1e-12, rtol=0)
        assert torch.equal(result["pair"][0], one["pair"][0])
        assert torch.equal(result["pair"][1][0], one["pair"][1][0])


def many_kinds_of_predictions() -> Any:
    """Predictions for several sizes of data: of all processes, of the first, and in parts."""
    results = {}
    for model in (OfManyKinds(), OfRaggedSamples()):
        trainer = Trainer(model, None, None, callbacks=[])
        for size in (1, 7, 26):
            data = regression_data(size)
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


def test_predictions_of_any_kind_are_those_of_one_process(ranks):
    one = alone(many_kinds_of_predictions)
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


@pytest.mark.programs
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss has another unit")
def test_predictions_take_their_memory_once():
    assert float(run_python(PREDICTS_MUCH)) < 1.6  # 2.0 if they were concatenated at the end


def damage(shard: Path) -> None:
    """Change the sign of a number among the outputs."""
    output = torch.load(shard)["outputs"].numpy().tobytes()
    content = bytearray(shard.read_bytes())
    content[content.index(output) + 3] ^= 0x80
    shard.write_bytes(content)


def test_damaged_predictions_are_not_read(tmp_path):
    predict(tmp_path, regression_data(9), shard_size=4)
    damage(sorted(tmp_path.glob("shard-*"))[1])
    with pytest.raises(ValueError, match=r"rank0.pt' is damaged: its content does not match its checksum"):
        read_predictions(tmp_path)


def test_damaged_predictions_are_made_again(tmp_path):
    data = regression_data(9)
    predict(tmp_path, data, shard_size=4)
    before = read_predictions(tmp_path)
    damage(sorted(tmp_path.glob("shard-*"))[1])
    with pytest.warns(UserWarning, match="predicted again"):
        predict(tmp_path, data, shard_size=4)
    assert torch.equal(read_predictions(tmp_path), before)


def test_a_damaged_number_of_predictions_is_noticed(tmp_path):
    predict(tmp_path, regression_data(9), shard_size=4)
    description = tmp_path / "predictions.json"
    description.write_text(description.read_text().replace("9", "8", 1))
    with pytest.raises(ValueError, match=r"predictions.json' is damaged"):
        read_predictions(tmp_path)


def test_other_files_beside_predictions_are_left_alone(tmp_path):
    (tmp_path / "shard-notes.pt").write_text("mine")
    for _ in range(2):
        predict(tmp_path, regression_data(9), overwrite=True)
    assert (tmp_path / "shard-notes.pt").read_text() == "mine"
