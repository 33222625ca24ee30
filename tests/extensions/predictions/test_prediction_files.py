"""Predictions in files: equal to predict(), from all processes, also after a kill."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.callbacks import PredictionWriterCallback, read_predictions
from tests.launching import CAN_SHARD, some_of
from tests.ranks import rank as own_rank
from tests.ranks import shared_folder
from tests.sharded import fit, gathered, large_model, sharded_trainer, sharding_accelerator
from tests.small_models import (
    Stream,
    adamw_trainer,
    float64_data,
    float64_model,
    listener,
    make_data,
    make_model,
    make_trainer,
)


def predict(folder: Any, data: Any, extra: Any = (), model: nn.Module | None = None, **kwargs: Any) -> list[Any]:
    writer = PredictionWriterCallback(folder, **({"shard_size": 6} | kwargs))
    trainer = adamw_trainer(model or float64_model(), callbacks=[writer, *extra])
    return list(trainer.predict_iter(data, per_device_batch_size=4))


def predictions() -> Any:
    with shared_folder() as folder:
        data, directory = float64_data(23), folder / "predictions"
        trainer = adamw_trainer(float64_model(), callbacks=[PredictionWriterCallback(directory, shard_size=3)])
        for _ in trainer.predict_iter(data, per_device_batch_size=2):
            pass
        written = read_predictions(directory)
        by_hand = float64_model()(data.tensors[0]).detach()
        names = [path.stem.partition("rank")[2] for path in directory.glob("shard-*")]
        return {"equal": bool(torch.allclose(written, by_hand)), "ranks": sorted(set(map(int, names)))}


def test_files_hold_what_predict_returns(tmp_path):
    data = float64_data(21)
    predict(tmp_path, data)
    assert len(list(tmp_path.glob("shard-*"))) == 3
    expected = adamw_trainer(float64_model()).predict(data, per_device_batch_size=4)
    assert torch.equal(read_predictions(tmp_path), expected)


def test_nested_outputs_keep_their_structure(tmp_path):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = float64_model()

        def forward(self, x):
            return {"y": self.inner(x), "twice": (x, self.inner(x) * 2)}

    data = float64_data(9)
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


def test_an_interrupted_prediction_continues(tmp_path, capsys):
    data = float64_data(21)
    break_off(tmp_path, data)
    with pytest.raises(ValueError, match=r"^\d+ of 21 predictions are missing in"):
        read_predictions(tmp_path)
    rest = predict(tmp_path, data)
    assert "16 of 21 samples have already been predicted" in capsys.readouterr().out
    assert sum(map(len, rest)) == 5
    expected = adamw_trainer(float64_model()).predict(data, per_device_batch_size=4)
    torch.testing.assert_close(read_predictions(tmp_path), expected)
    assert predict(tmp_path, data) == []
    assert sum(map(len, predict(tmp_path, data, overwrite=True))) == 21


@pytest.mark.parametrize("begin", [break_off, predict], ids=["half-written", "finished"])
def test_predictions_of_other_weights_are_replaced(begin, tmp_path, capsys):
    data = float64_data(21)
    begin(tmp_path, data)
    other = float64_model(seed=1)
    assert sum(map(len, predict(tmp_path, data, model=other))) == 21
    said = f"{str(tmp_path)!r} contains predictions of other or unknown weights, which are replaced: predicting all 21"
    assert capsys.readouterr().out.splitlines() == [f"{said} samples."]
    assert torch.equal(read_predictions(tmp_path), adamw_trainer(other).predict(data, per_device_batch_size=4))
    assert predict(tmp_path, data, model=other) == []  # they are known now
    assert "unknown weights" not in capsys.readouterr().out


def test_predictions_without_a_record_of_weights_are_replaced(tmp_path, capsys):
    """Predictions of version 0.2 have no such record."""
    data = float64_data(21)
    break_off(tmp_path, data)
    (tmp_path / "predictions.json").write_text('{"length": 21}')
    assert sum(map(len, predict(tmp_path, data))) == 21
    assert "contains predictions of other or unknown weights, which are replaced" in capsys.readouterr().out


def test_other_buffers_count_as_other_weights(tmp_path, capsys):
    model = nn.Sequential(nn.BatchNorm1d(5), float64_model()).double()
    predict(tmp_path, float64_data(9), model=model)
    model[0].running_mean += 1
    assert len(predict(tmp_path, float64_data(9), model=model)) == 3
    assert "unknown weights" in capsys.readouterr().out


class Scales(Trainer):
    """Makes its predictions with a module besides the model."""

    def calculate_predict_batch_output(self, batch: Any) -> Any:
        return self.scale(super().calculate_predict_batch_output(batch))


def test_weights_beside_the_model_count_if_the_trainer_uses_them(tmp_path, capsys):
    data = float64_data(9)

    def predict_with(trainer_class: type[Trainer], seed: int) -> None:
        writer = PredictionWriterCallback(tmp_path / trainer_class.__name__)
        trainer: Any = trainer_class(float64_model(), None, None, [writer])
        trainer.scale = float64_model(seed, features=1)
        list(trainer.predict_iter(data))

    for trainer_class, counts in ((Scales, True), (Trainer, False)):
        for seed in (0, 1):
            predict_with(trainer_class, seed)
        assert ("unknown weights" in capsys.readouterr().out) == counts


def predicts_into(directory: Path, seed: int) -> Any:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        trainer = adamw_trainer(float64_model(seed), callbacks=[PredictionWriterCallback(directory, shard_size=3)])
        parts = list(trainer.predict_iter(float64_data(21), per_device_batch_size=2))
    return {"samples": sum(map(len, parts)), "printed": output.getvalue()}


@pytest.mark.processes
def test_several_processes_replace_predictions_of_other_weights(tmp_path, two_ranks):
    data = float64_data(21)
    break_off(tmp_path, data)
    first, second = two_ranks.run(predicts_into, tmp_path, 1)
    assert first["samples"] == second["samples"] == 21
    assert first["printed"].count("predictions of other or unknown weights, which are replaced") == 1
    assert not second["printed"]
    expected = adamw_trainer(float64_model(seed=1)).predict(data, per_device_batch_size=4)
    torch.testing.assert_close(read_predictions(tmp_path), expected)
    assert predict(tmp_path, data, model=float64_model(seed=1)) == []  # one process knows them again


class CountedStream(Stream):
    def __len__(self) -> int:
        return len(self.data)


@pytest.mark.extension("streams")
def test_predictions_of_a_stream_are_not_written(tmp_path):
    with pytest.raises(TypeError, match="needs a dataset with a length"):
        predict(tmp_path / "stream", Stream())
    with pytest.raises(TypeError, match="needs a dataset whose samples have indices, not a stream"):
        predict(tmp_path / "counted", CountedStream(), model=make_model())


def test_predictions_continue_only_for_matching_data(tmp_path):
    predict(tmp_path, float64_data(9))
    with pytest.raises(ValueError, match="contains predictions for 9 samples, not 10"):
        predict(tmp_path, float64_data(10))
    with pytest.raises(FileNotFoundError, match="contains no predictions"):
        read_predictions(tmp_path / "none")
    with pytest.raises(ValueError, match="shard_size=0 must be at least 1"):
        PredictionWriterCallback(shard_size=0)


@pytest.mark.processes
def test_several_processes_write_the_same_predictions(ranks):
    for result in ranks(predictions):
        assert result["equal"]
        assert result["ranks"] == list(range(ranks.world_size))


def test_samples_predicted_by_only_one_process_are_repeated(tmp_path, capsys):
    data = float64_data(8)
    predict(tmp_path, data, shard_size=100)
    (path,) = tmp_path.glob("shard-*")
    shard = torch.load(path, weights_only=True)
    first_of_two = [0, 1, 4, 5]  # the second process was killed before it wrote any
    torch.save(shard | {"indices": first_of_two, "outputs": shard["outputs"][first_of_two]}, path)
    rest = predict(tmp_path, data)
    assert "2 of 8 samples have already been predicted" in capsys.readouterr().out
    assert sum(map(len, rest)) == 6
    expected = adamw_trainer(float64_model()).predict(data, per_device_batch_size=4)
    torch.testing.assert_close(read_predictions(tmp_path), expected)


def damage(shard: Path) -> None:
    """Change the sign of a number among the outputs."""
    output = torch.load(shard)["outputs"].numpy().tobytes()
    content = bytearray(shard.read_bytes())
    content[content.index(output) + 3] ^= 0x80
    shard.write_bytes(content)


def test_damaged_predictions_are_not_read(tmp_path):
    predict(tmp_path, float64_data(9), shard_size=4)
    damage(sorted(tmp_path.glob("shard-*"))[1])
    with pytest.raises(ValueError, match=r"rank0.pt' is damaged: its content does not match its checksum"):
        read_predictions(tmp_path)


def test_damaged_predictions_are_repeated(tmp_path):
    data = float64_data(9)
    predict(tmp_path, data, shard_size=4)
    before = read_predictions(tmp_path)
    damage(sorted(tmp_path.glob("shard-*"))[1])
    with pytest.warns(UserWarning, match="predicted again"):
        predict(tmp_path, data, shard_size=4)
    assert torch.equal(read_predictions(tmp_path), before)


def test_a_damaged_number_of_predictions_is_noticed(tmp_path):
    predict(tmp_path, float64_data(9), shard_size=4)
    description = tmp_path / "predictions.json"
    description.write_text(description.read_text().replace("9", "8", 1))
    with pytest.raises(ValueError, match=r"predictions.json' is damaged"):
        read_predictions(tmp_path)


def test_other_files_beside_predictions_are_left_alone(tmp_path):
    (tmp_path / "shard-notes.pt").write_text("mine")
    for _ in range(2):
        predict(tmp_path, float64_data(9), overwrite=True)
    assert (tmp_path / "shard-notes.pt").read_text() == "mine"


DESCRIPTIONS = ["[]", "5", "{", '{"length": "x", "attempts": 5}', '{"attempts": [5]}', '{"attempts": [{}]}']


@pytest.mark.parametrize("content", DESCRIPTIONS)
def test_a_description_of_predictions_of_another_shape_is_named(tmp_path, content):
    (tmp_path / "predictions.json").write_text(content)
    message = r"predictions.json' is not the description of predictions"
    with pytest.raises(ValueError, match=message):
        make_trainer([PredictionWriterCallback(tmp_path)]).predict(make_data())
    with pytest.raises(ValueError, match=message):
        read_predictions(tmp_path)
    make_trainer([PredictionWriterCallback(tmp_path, overwrite=True)]).predict(make_data())
    assert len(read_predictions(tmp_path)) == 6


def test_predictions_of_two_runs_are_not_mixed(tmp_path):
    data = make_data(8)
    first, second = (make_trainer([PredictionWriterCallback(tmp_path / "p")]) for _ in range(2))
    outputs = first.predict_iter(data, per_device_batch_size=2)
    next(outputs)
    with pytest.raises(RuntimeError, match=r"directory=.*another run"):
        second.predict(data)
    outputs.close()
    second.predict(data)


def test_a_refused_prediction_leaves_the_one_it_is_in_whole(tmp_path):
    data = make_data(8)
    trainer = make_trainer([PredictionWriterCallback(tmp_path / "p")])
    outputs = trainer.predict_iter(data, per_device_batch_size=2)
    parts = [next(outputs)]
    with pytest.raises(RuntimeError, match=r"directory=.*another run"):
        trainer.predict(data)
    parts.extend(outputs)
    assert torch.equal(read_predictions(tmp_path / "p"), torch.cat(parts))


def test_predictions_of_a_loader_are_written(tmp_path):
    trainer = adamw_trainer(float64_model(), callbacks=[PredictionWriterCallback(tmp_path)])
    outputs = trainer.predict(DataLoader(float64_data(11), 4))
    assert torch.equal(read_predictions(tmp_path), outputs)
    assert len(outputs) == 11


def write_sharded(how: str, folder: Path) -> tuple[Any, Any, int]:
    """The predictions of a sharded model, those that were written, and the number of shards."""
    writer = PredictionWriterCallback(folder / how)
    trainer = fit(sharded_trainer(how, []), how)
    predicted = trainer.predict(float64_data(7), 2)
    trainer.callback_handler.add_callback(writer)
    trainer.predict(float64_data(7), 2)
    return predicted, read_predictions(writer.directory), len(list(writer.directory.glob("shard-*")))


@CAN_SHARD
@pytest.mark.processes
@pytest.mark.soak
@pytest.mark.parametrize(("how", "processes"), some_of([("tp_fsdp", 4), ("tp_ddp", 4), ("tp", 2)]))
def test_one_of_the_processes_that_share_a_batch_writes_it(tmp_path, job, how, processes):
    for predicted, written, number in job(processes).run(write_sharded, how, tmp_path):
        torch.testing.assert_close(written, predicted)
        assert number == processes // 2


def write_seven_samples(folder: Path) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The weights and predictions of a model in shards; a process takes part in a step in which it has no sample."""
    writer, model = PredictionWriterCallback(folder), large_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = Trainer(model, nn.MSELoss(), optimizer, [writer], accelerator=sharding_accelerator())
    trainer.train(float64_data(12), 1, per_device_batch_size=3)
    trainer.predict(float64_data(7), per_device_batch_size=3)
    return gathered(trainer.model.state_dict()), read_predictions(folder)


@CAN_SHARD
@pytest.mark.processes
def test_one_process_knows_the_predictions_of_sharded_weights(tmp_path, two_ranks, capsys):
    data, model = float64_data(7), large_model()
    weights, predictions = two_ranks.run(write_seven_samples, tmp_path)[0]
    for has_same, number in ((True, 0), (False, 7)):
        model.load_state_dict({name: value if has_same else value + 1 for name, value in weights.items()})
        if has_same:
            torch.testing.assert_close(predictions, model.eval()(data.tensors[0]).detach())
        trainer = Trainer(model, None, None, [PredictionWriterCallback(tmp_path)])
        assert sum(map(len, trainer.predict_iter(data))) == number
        assert ("unknown weights" in capsys.readouterr().out) != has_same


def write_into_local_folders() -> str:
    """The errors for a relative folder if each process has its own working directory."""
    with shared_folder() as folder, contextlib.chdir(folder):
        os.mkdir(str(own_rank()))
        with contextlib.chdir(str(own_rank())), pytest.raises(OSError, match="predictions") as error:
            predict("predictions", float64_data(4))
        return str(error.value)


@pytest.mark.processes
def test_a_folder_not_shared_by_the_processes_is_an_error(two_ranks):
    for rank, said in enumerate(two_ranks(write_into_local_folders)):
        assert said.startswith("Rank 1 failed: FileNotFoundError: ") == (rank == 0)
        assert "directory='predictions' is not the directory of the first process on " in said


class WithoutTwo(torch.utils.data.Dataset):
    """Eight samples, one of which cannot be read."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return None if index == 2 else (torch.full((5,), float(index), dtype=torch.float64), torch.zeros(1))


def test_rows_of_unknown_samples_are_refused(tmp_path):
    def collate_fn(samples):
        return torch.utils.data.default_collate([sample for sample in samples if sample is not None])

    trainer = adamw_trainer(float64_model(), callbacks=[PredictionWriterCallback(tmp_path)])
    with pytest.raises(ValueError, match="cannot tell which of 4 samples the 3 rows of an output are"):
        list(trainer.predict_iter(WithoutTwo(), per_device_batch_size=4, collate_fn=collate_fn))
    assert not list(tmp_path.glob("shard-*"))


def test_samples_with_names_are_refused_at_once(tmp_path):
    data = {"a": torch.zeros(5, dtype=torch.float64), "b": torch.zeros(5, dtype=torch.float64)}

    class Named(torch.utils.data.Dataset):
        def __len__(self):
            return len(data)

        def __getitem__(self, name):
            return data[name], torch.zeros(1)

    trainer = adamw_trainer(float64_model(), callbacks=[PredictionWriterCallback(tmp_path)])
    with pytest.raises(TypeError, match="needs integers as indices of samples, not \\['a'\\]"):
        list(trainer.predict_iter(DataLoader(Named(), sampler=["a", "b"])))


@pytest.mark.parametrize("order", [np.arange(8)[::-1], torch.arange(8).flip(0)], ids=["numpy", "torch"])
def test_indices_may_be_numbers_of_numpy_or_torch(tmp_path, order):
    data = float64_data(8)
    trainer = adamw_trainer(float64_model(), callbacks=[PredictionWriterCallback(tmp_path)])
    loader = DataLoader(data, sampler=list(order), batch_size=4)
    predicted = trainer.predict(loader)
    assert torch.equal(read_predictions(tmp_path), predicted.flip(0))


def test_predictions_in_the_order_of_a_sampler_begin_again(tmp_path, capsys):
    data, order = float64_data(8), [0, 5, 3, 1, 2, 4, 6, 7]

    def begin() -> Any:
        trainer = adamw_trainer(float64_model(), callbacks=[PredictionWriterCallback(tmp_path, shard_size=1)])
        return trainer.predict_iter(data, 1, dataloader_kwargs={"sampler": order})

    interrupted = begin()
    for _ in range(4):
        next(interrupted)
    interrupted.close()
    predicted = torch.cat([*begin()])
    assert "incomplete predictions in the order of a sampler, which are replaced" in capsys.readouterr().out
    assert torch.equal(read_predictions(tmp_path)[order], predicted)
    assert [*begin()] == []


def test_samples_of_several_rows_may_have_one_output(tmp_path):
    class MeanOfCrops(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = float64_model()

        def forward(self, crops):
            return self.inner(crops).unflatten(0, (-1, 3)).mean(1)

    def collate_fn(samples):
        return torch.stack([x + crop for x, _ in samples for crop in range(3)])

    trainer = adamw_trainer(MeanOfCrops(), callbacks=[PredictionWriterCallback(tmp_path)])
    predicted = trainer.predict(float64_data(8), per_device_batch_size=4, collate_fn=collate_fn)
    assert torch.equal(read_predictions(tmp_path), predicted)
