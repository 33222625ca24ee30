"""Testing every checkpoint with every setting on every dataset, with results on disk, resumable."""

from __future__ import annotations

import csv
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Subset

pytest.importorskip("jsonargparse", reason="needs the extra cli")

from pytorch_accel_lite import TrainerCallback, callbacks
from pytorch_accel_lite.callbacks import (
    SaveBestModelCallback,
    SaveTrainingStateCallback,
    iterate_predictions,
    read_predictions,
)
from pytorch_accel_lite.experiment import Experiment, run_tests
from pytorch_accel_lite.extensions.experiment.chosen_weights import find_weights
from pytorch_accel_lite.extensions.experiment.command_line import main
from pytorch_accel_lite.extensions.experiment.results import added_callbacks
from tests.extensions.experiment import parts
from tests.extensions.experiment.small_experiment import FILE
from tests.launching import SOAK, run_forked
from tests.small_models import listener

OPTIONS: dict[str, Any] = {"worst": 3, "per_device_batch_size": 2, "shard_size": 2}
SETTINGS = {"plain": {}, "double": {"scale": 2.0}}


def scaled_trainer(*further: TrainerCallback) -> parts.ScaledTrainer:
    model = parts.Net()
    callbacks = [SaveBestModelCallback(keep=2), SaveTrainingStateCallback(save_every_n_epochs=1), *further]
    return parts.ScaledTrainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.05), callbacks, seed=0)


@pytest.fixture
def trainer(tmp_path, monkeypatch) -> parts.ScaledTrainer:
    """A trainer that has saved its two best models and three states."""
    monkeypatch.chdir(tmp_path)
    trainer = scaled_trainer()
    data = parts.load_data()
    trainer.train(data, 3, data, per_device_batch_size=8)
    return trainer


def files(folder: str) -> dict[str, Any]:
    """The results in a folder: texts, and predictions in order."""
    found = {str(path.relative_to(folder)): path.read_text() for path in sorted(Path(folder).rglob("*.[jcm]*[nvd]"))}
    predictions = {str(path.relative_to(folder)): read_predictions(path) for path in Path(folder).rglob("predictions")}
    return found | {name: value.tolist() for name, value in predictions.items()}


def test_each_combination_is_tested_and_listed_in_the_table(trainer):
    data = {"small": parts.load_data(10), "large": parts.load_data(20)}
    rows = run_tests(trainer, data, ["best", "last"], SETTINGS, worst=3, per_device_batch_size=4)
    assert [tuple(row.values())[:3] for row in rows[:3]] == [
        ("best", "plain", "small"),
        ("best", "plain", "large"),
        ("best", "double", "small"),
    ]
    assert len(rows) == 8
    assert trainer.scale == 1.0
    plain, double = (read_predictions(f"tests/best/{name}/small/predictions") for name in SETTINGS)
    assert torch.equal(2 * plain, double)
    expected = trainer.evaluate(data["small"], per_device_batch_size=4)["evaluation_loss"]
    assert rows[4]["evaluation_loss"] == expected
    worst = json.loads(Path("tests/best/plain/small/worst.json").read_text())
    losses = ((plain - data["small"].tensors[1]) ** 2).flatten()
    assert [sample["index"] for sample in worst] == losses.topk(3).indices.tolist()
    with open("tests/results.csv") as file:
        assert [row["dataset"] for row in csv.DictReader(file)] == ["small", "large"] * 4
    assert len(trainer.callbacks) == 2


@pytest.mark.parametrize("predictions", [True, False])
@pytest.mark.extension("error_notes")
def test_an_error_names_the_batch_its_samples_and_what_is_tested(trainer, predictions):
    data = parts.load_data(10)
    poison = data.tensors[0][5]

    def refuse(module: nn.Module, args: tuple[torch.Tensor]) -> None:
        if (args[0] == poison).all(1).any():
            raise ValueError("cannot digest this")

    trainer.model.register_forward_pre_hook(refuse)
    with pytest.raises(ValueError, match="cannot digest this") as caught:
        run_tests(trainer, {"clean": data}, ["last"], SETTINGS, predictions=predictions, **OPTIONS)
    batch, test = caught.value.__notes__
    assert batch.startswith(f"In {'prediction' if predictions else 'evaluation'}, step 2:\n  batch: ")
    assert "samples [4, 5]" in batch.replace("\n    ", " ")
    assert test == "In testing checkpoint 'last', inference 'plain', dataset 'clean'."
    with pytest.raises(ValueError, match="inference: the setting 'odd' sets 'nothing'"):
        run_tests(trainer, data, ["last"], {"odd": {"nothing": 1}})


@pytest.mark.extension("failed_batches")
def test_a_test_may_skip_and_list_failed_batches(trainer, capsys):
    data = parts.load_data(10)
    poison = data.tensors[0][5]

    def refuse(module: nn.Module, args: tuple[torch.Tensor]) -> None:
        if (args[0] == poison).all(1).any():
            raise ValueError("cannot digest this")

    trainer.model.register_forward_pre_hook(refuse)
    trainer.callback_handler.add_callback(callbacks.SkipFailedBatchesCallback(phases=["evaluation", "prediction"]))
    (row,) = run_tests(trainer, data, ["last"], **OPTIONS)
    others = Subset(data, [0, 1, 2, 3, 6, 7, 8, 9])
    assert row["evaluation_loss"] == trainer.evaluate(others, 2)["evaluation_loss"]
    folder = "tests/last/default/test"
    failure = {"rank": 0, "indices": [4, 5], "error": "ValueError: cannot digest this"}
    assert json.loads(Path(f"{folder}/metrics.json").read_text())["left_out"] == [failure]
    with pytest.warns(UserWarning, match=r"2 of 10 samples were left out of .*predictions', as they failed: \[4, 5\]"):
        written = read_predictions(f"{folder}/predictions")
    assert torch.equal(written, trainer.predict(others, 2))
    indices = [index for part, _ in iterate_predictions(f"{folder}/predictions") for index in part]
    assert sorted(indices) == list(others.indices)
    said = capsys.readouterr().out
    assert "Skipped in the prediction: 2 samples, step 2" in said
    assert "Skipped in the evaluation: 2 samples, step 2" in said
    assert run_tests(trainer, data, ["last"], **OPTIONS) == [row]
    said = capsys.readouterr().out
    assert "test is finished: skipped" in said
    Path(f"{folder}/metrics.json").unlink()
    assert run_tests(trainer, data, ["last"], **OPTIONS) == [row]
    assert "Skipped in the prediction" not in capsys.readouterr().out  # all are predicted


def test_a_finished_test_is_skipped_until_its_checkpoint_changes(trainer, capsys):
    data = parts.load_data(6)
    rows = run_tests(trainer, data, worst=0)
    capsys.readouterr()
    assert run_tests(trainer, data, worst=0) == rows
    assert "tests/best/default/test is finished: skipped" in capsys.readouterr().out
    nn.init.zeros_(trainer.model.layers[-1].weight)
    trainer.save_checkpoint("best_model.pt", {"eval_loss_epoch": 9.0})
    again = run_tests(trainer, data, worst=0)
    assert again[0]["evaluation_loss"] != rows[0]["evaluation_loss"]
    assert read_predictions("tests/best/default/test/predictions").unique().numel() == 1


def test_an_interrupted_test_keeps_no_predictions_of_old_weights(trainer):
    class Interrupt(TrainerCallback):
        def configure_run(self, trainer: Any, request: Any, **kwargs: Any) -> None:
            if request.kind == "prediction":
                raise KeyboardInterrupt

    run_tests(trainer, parts.load_data(6), worst=0)
    nn.init.zeros_(trainer.model.layers[-1].weight)
    trainer.save_checkpoint("best_model.pt", {"eval_loss_epoch": 9.0})
    other_length = parts.load_data(5)
    with added_callbacks(trainer, Interrupt()), pytest.raises(KeyboardInterrupt):
        run_tests(trainer, other_length, worst=0)
    run_tests(trainer, other_length, worst=0)
    found = read_predictions("tests/best/default/test/predictions")
    assert len(found) == 5
    assert found.unique().numel() == 1


def test_changed_dependencies_are_tested_again(trainer):
    data = parts.load_data(6)

    def doubled(scale: float = 2.0, **kwargs: Any) -> float:
        run_tests(trainer, data, inference={"double": {"scale": scale}}, worst=0, **kwargs)
        return read_predictions("tests/best/double/test/predictions").sum().item()

    first = doubled()
    assert doubled(-2.0) == -first  # the setting of that name
    data.tensors[0].zero_()
    assert doubled(-2.0) == -first
    assert abs(doubled(-2.0, depends_on={"data": "zeros"})) != abs(first)
    assert doubled(-2.0, depends_on={"data": "zeros"}) == doubled(-2.0, depends_on={"data": "of zeros"})


def test_a_larger_number_of_worst_samples_is_listed_again(trainer):
    data = parts.load_data(6)
    for worst in (0, 2, 3):
        run_tests(trainer, data, worst=worst, predictions=False)
    assert len(json.loads(Path("tests/best/default/test/worst.json").read_text())) == 3
    assert not Path("tests/best/default/test/predictions").exists()
    run_tests(trainer, data, worst=3)
    assert len(read_predictions("tests/best/default/test/predictions")) == 6


def test_checkpoints_that_would_share_a_folder_are_refused(trainer):
    trainer.save_model("best_model.safetensors")
    with pytest.raises(ValueError, match=r"would share the folder of one\. Test them"):
        run_tests(trainer, parts.load_data(6), ["best_model.pt", "best_model.safetensors"])
    assert not Path("tests").exists()


def test_best_and_last_weights_can_be_averaged(trainer):
    weight = trainer.model.layers[0].weight

    def loaded(paths: list[Path]) -> list[torch.Tensor]:
        found = []
        for path in paths:
            (trainer.load_training_state if path.is_dir() else trainer.load_checkpoint)(path)
            found.append(weight.detach().double())
        return found

    def averaged(name: str) -> torch.Tensor:
        run_tests(trainer, parts.load_data(6), [name], worst=0, predictions=False)
        return weight.detach().clone()

    of_last = loaded(sorted(Path("training_states").glob("update-*")))
    of_best = loaded([Path(f"best_model-epoch{epoch:04d}.pt") for epoch in (2, 3)])
    assert torch.equal(averaged("average_last_3"), (sum(of_last[::-1]) / 3).float())
    assert torch.equal(averaged("average_best_2"), (sum(of_best[::-1]) / 2).float())
    with pytest.raises(FileNotFoundError, match=r"There are 3 of the 4 last weights: .*max_checkpoints=4"):
        run_tests(trainer, parts.load_data(6), ["average_last_4"])


class WithHead(parts.ScaledTrainer):
    """Learns a head and a factor of its loss beside the model."""

    def __init__(self, *callbacks: TrainerCallback) -> None:
        model, loss = parts.Net(), ScaledError()
        self.head = nn.Linear(1, 1)
        learned = [*model.parameters(), *loss.parameters(), *self.head.parameters()]
        super().__init__(model, loss, torch.optim.SGD(learned, lr=0.05), callbacks, seed=0)

    def calculate_predict_batch_output(self, batch: Any) -> torch.Tensor:
        return self.head(super().calculate_predict_batch_output(batch))

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        outputs = self.head(self.model(batch[0]))
        return {"loss": self.loss_func(outputs, batch[1]), "model_outputs": outputs, "batch_size": len(batch[0])}


class ScaledError(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return ((outputs * self.scale - targets) ** 2).mean()


def test_averages_include_modules_beside_the_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = parts.load_data()
    callbacks = SaveBestModelCallback(keep=2), SaveTrainingStateCallback(save_every_n_epochs=1)
    trained = WithHead(*callbacks)
    trained.train(data, 3, data, per_device_batch_size=8)

    def tested(name: str) -> tuple[float, float]:
        fresh = WithHead(*callbacks)  # which no other test has set
        run_tests(fresh, parts.load_data(6), [name], worst=0)
        return fresh.loss_func.scale.item(), fresh.head.weight.item()

    for average, paths in (
        ("average_last_2", sorted(map(str, Path("training_states").glob("update-*")))[-2:]),
        ("average_best_2", sorted(map(str, Path().glob("best_model-epoch*.pt")))),
    ):
        expected = torch.tensor([tested(path) for path in paths]).mean(0)
        assert tested(average) == pytest.approx(tuple(expected.tolist()))
    trained.save_model("alone.safetensors")
    with pytest.warns(UserWarning, match=r"'alone.safetensors' holds only .*: head, loss_func\. Pass a"):
        tested("alone.safetensors")


def test_averages_of_the_best_are_of_the_newest_run(trainer):
    data = parts.load_data()
    Path("best_model-epoch0002-mine.pt").touch()
    assert len(list(Path().glob("best_model-epoch*.pt"))) == 3
    second = scaled_trainer()
    second.train(data, 1, data, per_device_batch_size=8)
    assert sorted(map(str, Path().glob("best_model-*"))) == ["best_model-epoch0001.pt", "best_model-epoch0002-mine.pt"]
    with pytest.raises(FileNotFoundError, match="There are 1 of the 2 best weights"):
        run_tests(second, data, ["average_best_2"])


class Odd(TrainerCallback):
    """Records a metric of which the first epoch has the best value."""

    def on_eval_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
        trainer.run_history.update_metric("odd", trainer.progress.epoch)


def test_several_callbacks_do_not_mix_their_models(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = parts.load_data()
    by_odd = SaveBestModelCallback("odd.pt", watch_metric="odd", greater_is_better=False, keep=2)
    trainer = scaled_trainer(by_odd, SaveTrainingStateCallback("each", save_every_n_steps=1), Odd())
    trainer.callbacks[0].keep = 1
    trainer.train(data, 3, data, per_device_batch_size=8)
    states = [torch.load(path)["model_state_dict"]["layers.0.weight"] for path in sorted(Path().glob("odd-*.pt"))]
    run_tests(trainer, data, ["average_best_2"], worst=0, predictions=False)
    assert torch.equal(trainer.model.layers[0].weight, ((states[0].double() + states[1].double()) / 2).float())
    with pytest.raises(FileNotFoundError, match="There are 2 of the 3 best weights"):
        run_tests(trainer, data, ["average_best_3"])


def test_the_last_weights_are_in_the_newest_state_of_all(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = parts.load_data()
    newer = SaveTrainingStateCallback("newer", save_every_n_steps=1)
    trainer = scaled_trainer(newer, parts.StopAt(8))
    trainer.callbacks[1].save_at_end = False
    trainer.train(data, 3, data, per_device_batch_size=8)
    assert len(list(Path("training_states").glob("update-*"))) == 2
    assert find_weights(trainer, "last") == [Path("newer/update-000000008")]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"checkpoints": "best"}, r"checkpoints='best' must be a list. Write: checkpoints=\['best'\]"),
        ({"checkpoints": ["nowhere.pt"]}, "There are no weights at 'nowhere.pt'"),
        (
            {"inference": {"a": {"scal": 3}}},
            "the setting 'a' sets 'scal', but 'ScaledTrainer' object has no attribute 'scal'",
        ),
        ({"worst": -1}, "worst=-1 must be at least 0"),
        ({"inference": {"a": {"model.layer": 3}}}, "sets 'model.layer', but 'Net' object has no attribute 'layer'"),
    ],
)
def test_invalid_tests_are_refused_before_writing_anything(trainer, arguments, error):
    with pytest.raises((FileNotFoundError, AttributeError, TypeError, ValueError), match=error):
        run_tests(trainer, parts.load_data(6), **arguments)
    assert not Path("tests").exists()


@pytest.mark.soak
def test_a_killed_test_leaves_the_same_files_as_one_that_was_not(trainer):
    size = 60 if SOAK else 12
    data = parts.load_data(size)
    options = {"inference": SETTINGS, "worst": 2, "per_device_batch_size": 2, "shard_size": 4}
    run_tests(trainer, data, **options, save_dir="whole")
    folder = Path.cwd()
    # Within predictions and evaluations of both settings.
    for step in [3] * 9 + [25] + [3] * 9 + [35] if SOAK else [3, 8, 7]:

        def killed(step: int = step) -> None:
            os.chdir(folder)
            run_tests(scaled_trainer(parts.KillAt(step)), data, **options, save_dir="killed")

        assert run_forked(killed).returncode == -signal.SIGKILL
    run_tests(trainer, data, **options, save_dir="killed")
    whole, killed = files("whole"), files("killed")
    assert whole == killed
    assert len(whole) > 8
    for folder in Path("killed").rglob("predictions"):
        assert dict_of(folder).keys() == {*range(size)}


def test_samples_are_ranked_by_a_function_of_outputs_and_targets(trainer):
    data = parts.load_data(7)
    run_tests(trainer, data, worst=3, worst_by=parts.absolute_error, per_device_batch_size=3)
    worst = json.loads(Path("tests/best/default/test/worst.json").read_text())
    errors = (read_predictions("tests/best/default/test/predictions") - data.tensors[1]).abs().flatten()
    assert [sample["index"] for sample in worst] == errors.topk(3).indices.tolist()
    assert [sample["absolute_error"] for sample in worst] == errors.topk(3).values.tolist()
    assert "loss" not in worst[0]
    again = run_tests(trainer, data, worst=3, worst_by=parts.absolute_error)
    assert again == run_tests(trainer, data, worst=3, worst_by=parts.absolute_error)


class ListTrainer(parts.ScaledTrainer):
    """Gives a dict for each sample, of tensors that differ in length, as detection models do."""

    def calculate_eval_batch_loss(self, batch):
        return super().calculate_eval_batch_loss(batch) | {"model_outputs": self.calculate_predict_batch_output(batch)}

    def calculate_predict_batch_output(self, batch):
        return [{"found": value.expand(int(10 * value.abs()) + 1)} for value in self.model(batch[0])]


def test_outputs_may_differ_in_length_between_samples(trainer):
    of_lists = ListTrainer(trainer.model, nn.MSELoss(), None, [*trainer.callbacks], seed=0)

    def missed(outputs, targets):
        return [abs(float(output["found"][0] - target)) for output, target in zip(outputs, targets, strict=True)]

    data = parts.load_data(7)
    run_tests(of_lists, data, worst=2, worst_by=missed, per_device_batch_size=3, shard_size=3)
    found = read_predictions("tests/best/default/test/predictions")
    values = torch.stack([output["found"][0] for output in found])
    assert torch.allclose(values, of_lists.model(data.tensors[0]).flatten().detach())
    worst = json.loads(Path("tests/best/default/test/worst.json").read_text())
    errors = (values - data.tensors[1].flatten()).abs()
    assert [sample["index"] for sample in worst] == errors.topk(2).indices.tolist()
    assert worst[0]["prediction"]["found"] == found[worst[0]["index"]]["found"].tolist()


def run_in(folder: str, save_dir: str) -> list[dict[str, Any]]:
    """Test the best weights in a folder."""
    os.chdir(folder)
    torch.manual_seed(0)
    data = parts.load_data(14)
    trainer = parts.ScaledTrainer(parts.Net(), nn.MSELoss(), None, [SaveBestModelCallback()], seed=0)
    return run_tests(trainer, data, **OPTIONS, save_dir=save_dir)


def test_results_are_the_same_on_several_processes(two_ranks, trainer):
    found = two_ranks.run(run_in, os.getcwd(), "both")
    assert found[0] == found[1]
    [alone] = run_in(os.getcwd(), "alone")
    [together] = found[0]
    assert together["evaluation_loss"] == pytest.approx(alone["evaluation_loss"])
    worst = [json.loads(Path(folder, "best/default/test/worst.json").read_text()) for folder in ("alone", "both")]
    assert [sample["index"] for sample in worst[0]] == [sample["index"] for sample in worst[1]]
    found = [dict_of(Path(folder, "best/default/test/predictions")) for folder in ("alone", "both")]
    assert found[0].keys() == found[1].keys() == {*range(14)}
    assert all(torch.allclose(found[0][index], found[1][index]) for index in found[0])


def dict_of(folder: Path) -> dict[int, torch.Tensor]:
    """Predictions by sample, none of which is there twice."""
    shards = list(iterate_predictions(folder))
    indices = [index for shard, _ in shards for index in shard]
    assert len(set(indices)) == len(indices)
    return dict(zip(indices, torch.cat([outputs for _, outputs in shards]), strict=True))


def test_a_test_repeats_shards_that_one_process_had_not_written(trainer):
    data = parts.load_data(12)
    options = {"worst": 0, "per_device_batch_size": 2, "shard_size": 2}
    run_tests(trainer, data, **options)
    whole = read_predictions("tests/best/default/test/predictions")
    Path("tests/best/default/test/metrics.json").unlink()
    shards = sorted(Path("tests/best/default/test/predictions").glob("shard-*"))
    assert len(shards) == 6
    shards[2].unlink()  # of another process, which had not written it when all were killed
    seen = []
    look = listener(on_predict_step_end=lambda trainer, **kwargs: seen.extend(trainer.batch_indices))
    with added_callbacks(trainer, look):
        run_tests(trainer, data, **options)
    assert seen == [*range(4, 12)]
    assert torch.equal(read_predictions("tests/best/default/test/predictions"), whole)
    assert len(dict_of(Path("tests/best/default/test/predictions"))) == 12


@pytest.mark.slow
def test_the_test_command_follows_the_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sections = "test:\n  checkpoints: [best]\n  worst: 2\n  inference:\n    a: {scale: 1.0}\n    b: {scale: 3.0}\n"
    trainer = "trainer:\n  class_path: tests.extensions.experiment.parts.ScaledTrainer\n  init_args: {seed: 3}\n"
    text = FILE.replace("trainer: {seed: 3}\n", trainer) + sections
    Path("small.yaml").write_text(text + "callbacks: [SaveBestModelCallback]\n")
    Experiment.from_file("small.yaml").train()
    assert main(["test", "small.yaml", "--test.worst", "1"]) == 0
    printed = capsys.readouterr().out
    assert "checkpoint best, inference b, dataset eval, evaluation_loss " in printed
    folder = Path("runs/small/tests/best")
    assert len(json.loads((folder / "a" / "eval" / "worst.json").read_text())) == 1
    text = Path("small.yaml").read_text()
    Path("small.yaml").write_text(text.replace("{size: 8}", "{size: 6}").replace("scale: 3.0", "scale: 4.0"))
    assert main(["test", "small.yaml"]) == 0
    assert len(json.loads((folder / "a" / "eval" / "worst.json").read_text())) == 2
    single, scaled = (read_predictions(folder / name / "eval" / "predictions") for name in "ab")
    assert len(single) == 6
    assert torch.equal(4 * single, scaled)
    assert main(["test", "small.yaml", "--test.wurst", "1"]) == 2
    assert "Did you mean 'worst'?" in capsys.readouterr().err
    assert main(["test", "small.yaml", "--test.worst_by", "tests.extensions.experiment.parts.nothing"]) == 2
    assert "nothing' must be null. Type " in capsys.readouterr().err
    assert main(["test", "small.yaml", "--test.worst_by", "tests.extensions.experiment.parts.absolute_error"]) == 0
    assert "absolute_error" in json.loads((folder / "a" / "eval" / "worst.json").read_text())[0]


@pytest.mark.thorough
@pytest.mark.slow
def test_the_command_tests_again_with_another_loss_or_callback(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(FILE + "callbacks: [SaveBestModelCallback]\ntest: {worst: 0, predictions: false}\n")
    Experiment.from_file("small.yaml").train()
    metric = "{class_path: MetricsCallback, init_args: {metrics: {mae: {class_path: torchmetrics.MeanAbsoluteError}}}}"
    results = []
    for options in ([], ["--loss_func", "L1Loss"], ["--callbacks+", metric], ["--trainer.seed", "4"]):
        capsys.readouterr()
        assert main(["test", "small.yaml", *options]) == 0
        assert "skipped" not in capsys.readouterr().out
        results.append(json.loads(Path("runs/small/tests/best/default/eval/metrics.json").read_text())["metrics"])
    assert results[1]["evaluation_loss"] == pytest.approx(results[2]["mae"])
    assert main(["test", "small.yaml", "--trainer.seed", "4"]) == 0
    assert "skipped" in capsys.readouterr().out
