"""Testing: every checkpoint by every setting by every dataset, on disk, resumable."""

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

pytest.importorskip("jsonargparse", reason="needs the extra cli")

from pytorch_accel_lite import TrainerCallback
from pytorch_accel_lite.callbacks import SaveBestModelCallback, SaveTrainingStateCallback, read_predictions
from pytorch_accel_lite.experiment import Experiment, run_tests
from pytorch_accel_lite.experiment.command_line import main
from tests import experiment_parts as parts
from tests.launching import SOAK, run_forked
from tests.test_experiments import FILE

SETTINGS = {"plain": {}, "double": {"scale": 2.0}}


def make_trainer(*further: TrainerCallback) -> parts.ScaledTrainer:
    model = parts.Net()
    callbacks = [SaveBestModelCallback(keep=2), SaveTrainingStateCallback(save_every_n_epochs=1), *further]
    return parts.ScaledTrainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.05), callbacks, seed=0)


@pytest.fixture
def trained(tmp_path, monkeypatch) -> parts.ScaledTrainer:
    """A trainer that has saved its two best models and three states."""
    monkeypatch.chdir(tmp_path)
    trainer = make_trainer()
    data = parts.load_data()
    trainer.train(data, 3, data, per_device_batch_size=8)
    return trainer


def files(folder: str) -> dict[str, Any]:
    """The results in a folder: texts, and predictions in order."""
    found = {str(path.relative_to(folder)): path.read_text() for path in sorted(Path(folder).rglob("*.[jcm]*[nvd]"))}
    predictions = {str(path.relative_to(folder)): read_predictions(path) for path in Path(folder).rglob("predictions")}
    return found | {name: value.tolist() for name, value in predictions.items()}


def test_each_combination_has_its_results_and_the_tables_list_all(trained):
    data = {"small": parts.load_data(10), "large": parts.load_data(20)}
    rows = run_tests(trained, data, ["best", "last"], SETTINGS, worst=3, per_device_batch_size=4)
    assert [tuple(row.values())[:3] for row in rows[:3]] == [
        ("best", "plain", "small"),
        ("best", "plain", "large"),
        ("best", "double", "small"),
    ]
    assert len(rows) == 8
    assert trained.scale == 1.0
    plain, double = (read_predictions(f"tests/best/{name}/small/predictions") for name in SETTINGS)
    assert torch.equal(2 * plain, double)
    expected = trained.evaluate(data["small"], per_device_batch_size=4)["evaluation_loss"]
    assert rows[4]["evaluation_loss"] == expected
    worst = json.loads(Path("tests/best/plain/small/worst.json").read_text())
    losses = ((plain - data["small"].tensors[1]) ** 2).flatten()
    assert [sample["index"] for sample in worst] == losses.topk(3).indices.tolist()
    assert len(Path("tests/results.md").read_text().splitlines()) == 10
    with open("tests/results.csv") as file:
        assert [row["dataset"] for row in csv.DictReader(file)] == ["small", "large"] * 4
    assert len(trained.callbacks) == 2


def test_what_is_finished_is_skipped_until_its_checkpoint_changes(trained, capsys):
    data = parts.load_data(6)
    rows = run_tests(trained, data, worst=0)
    capsys.readouterr()
    assert run_tests(trained, data, worst=0) == rows
    assert "tests/best/default/test is finished: skipped" in capsys.readouterr().out
    nn.init.zeros_(trained.model.layers[-1].weight)
    trained.save_checkpoint("best_model.pt", {"eval_loss_epoch": 9.0})
    again = run_tests(trained, data, worst=0)
    assert again[0]["evaluation_loss"] != rows[0]["evaluation_loss"]
    assert read_predictions("tests/best/default/test/predictions").unique().numel() == 1


def test_what_depends_on_something_else_is_tested_again(trained):
    data = parts.load_data(6)

    def doubled(scale: float = 2.0, **kwargs: Any) -> float:
        run_tests(trained, data, inference={"double": {"scale": scale}}, worst=0, **kwargs)
        return read_predictions("tests/best/double/test/predictions").sum().item()

    first = doubled()
    assert doubled(-2.0) == -first  # the setting of that name
    data.tensors[0].zero_()
    assert doubled(-2.0) == -first
    assert abs(doubled(-2.0, depends_on={"data": "zeros"})) != abs(first)
    assert doubled(-2.0, depends_on={"data": "zeros"}) == doubled(-2.0, depends_on={"data": "of zeros"})


def test_samples_that_were_not_listed_before_are(trained):
    data = parts.load_data(6)
    for worst in (0, 2, 3):
        run_tests(trained, data, worst=worst, predictions=False)
    assert len(json.loads(Path("tests/best/default/test/worst.json").read_text())) == 3
    assert not Path("tests/best/default/test/predictions").exists()
    run_tests(trained, data, worst=3)
    assert len(read_predictions("tests/best/default/test/predictions")) == 6


def test_checkpoints_that_would_share_a_folder_are_refused(trained):
    trained.save_model("best_model.safetensors")
    with pytest.raises(ValueError, match=r"would share folders: \['best_model', 'best_model'\]\. Test them"):
        run_tests(trained, parts.load_data(6), ["best_model.pt", "best_model.safetensors"])
    assert not Path("tests").exists()


def test_averages_of_the_best_and_the_last(trained):
    weight = trained.model.layers[0].weight

    def loaded(paths: list[Path]) -> list[torch.Tensor]:
        found = []
        for path in paths:
            (trained.load_training_state if path.is_dir() else trained.load_checkpoint)(path)
            found.append(weight.detach().double())
        return found

    def averaged(name: str) -> torch.Tensor:
        run_tests(trained, parts.load_data(6), [name], worst=0, predictions=False)
        return weight.detach().clone()

    of_last = loaded(sorted(Path("training_states").glob("update-*")))
    of_best = loaded([Path(f"best_model-epoch{epoch:04d}.pt") for epoch in (2, 3)])
    assert torch.equal(averaged("average_last_3"), (sum(of_last[::-1]) / 3).float())
    assert torch.equal(averaged("average_best_2"), (sum(of_best[::-1]) / 2).float())
    with pytest.raises(FileNotFoundError, match=r"There are 3 of the 4 last weights: .* max_checkpoints=4 or more"):
        run_tests(trained, parts.load_data(6), ["average_last_4"])


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"checkpoints": ["nowhere.pt"]}, "There are no weights at 'nowhere.pt'"),
        ({"inference": {"beam": {"beam_width": 3}}}, "beam_width"),
        ({"inference": {"a/b": {}}}, "The name 'a/b' cannot be that of a folder"),
    ],
)
def test_what_cannot_be_tested_is_refused_before_anything_is_written(trained, arguments, error):
    with pytest.raises((FileNotFoundError, AttributeError, ValueError), match=error):
        run_tests(trained, parts.load_data(6), **arguments)
    assert not Path("tests").exists()


def test_a_killed_test_leaves_the_same_files_as_one_that_was_not(trained):
    data = parts.load_data(12)
    options = {"inference": SETTINGS, "worst": 2, "per_device_batch_size": 2}
    run_tests(trained, data, **options, save_dir="whole")
    folder = Path.cwd()
    for step in [*range(2, 22)] if SOAK else [3, 8, 13]:

        def killed(step: int = step) -> None:
            os.chdir(folder)
            run_tests(make_trainer(parts.KillAt(step)), data, **options, save_dir="killed")

        assert run_forked(killed).returncode == -signal.SIGKILL
    run_tests(trained, data, **options, save_dir="killed")
    whole, killed = files("whole"), files("killed")
    assert whole == killed
    assert len(whole) > 8


def test_the_command_tests_as_the_file_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sections = "test:\n  checkpoints: [best]\n  worst: 2\n  inference:\n    a: {scale: 1.0}\n    b: {scale: 3.0}\n"
    trainer = "trainer:\n  class_path: tests.experiment_parts.ScaledTrainer\n  init_args: {seed: 3}\n"
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
