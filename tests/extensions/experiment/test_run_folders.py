"""The folders of runs: their names, the folder of a command, and their contents."""

from __future__ import annotations

import gc
import json
import os
import re
from pathlib import Path

import pytest

pytest.importorskip("jsonargparse", reason="needs the extra cli")

from pytorch_accel_lite.experiment import Experiment
from pytorch_accel_lite.extensions.experiment.command_line import main
from tests.extensions.experiment.small_experiment import FILE, run
from tests.launching import run_elastic, run_forked

CALLBACKS = """
callbacks:
  - SaveBestModelCallback
  - class_path: SaveTrainingStateCallback
    init_args: {save_every_n_epochs: 1}
"""
STATE = "training_states/update-000000003"


@pytest.fixture
def file(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "small.yaml"
    path.write_text(FILE + CALLBACKS)
    return path


def contents(folder: str | Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def epochs_in(folder: str | Path) -> list[int]:
    return [json.loads(row)["epoch"] for row in Path(folder, "metrics.jsonl").read_text().splitlines()]


def folders() -> list[str]:
    return sorted(path.name for path in Path("runs").iterdir())


def test_each_new_run_has_its_own_folder(file, capsys):
    assert "Everything is in runs/small\n" in run("train", file, capsys=capsys)[1]
    first = contents("runs/small")
    printed = run("train", file, "--model.width=7", capsys=capsys)[1]
    assert "This run is in runs/small-run2, as runs/small has one already.\n" in printed
    assert "Everything is in runs/small-run2\n" in printed
    code, printed, _ = run("train", file, "--model.width=7", "--resume=latest", "--train.num_epochs=3", capsys=capsys)
    assert (code, epochs_in("runs/small-run2")) == (0, [1, 2, 3])
    assert "Resuming from 'runs/small-run2/training_states" in printed
    assert run("train", file, "--overwrite", "--train.num_epochs=1", capsys=capsys)[0] == 0
    assert epochs_in("runs/small-run2") == [1]
    assert contents("runs/small") == first
    assert (
        f"Loaded the weights in runs/small-run2/{STATE}\n" in run("evaluate", file, "--weights=last", capsys=capsys)[1]
    )


def test_an_untrained_experiment_releases_its_folder(file, monkeypatch):
    first = Experiment.from_file(file)
    assert first.output_dir == Path("runs/small")
    (file.parent / "elsewhere").mkdir()
    monkeypatch.chdir(file.parent / "elsewhere")
    second = Experiment.from_file(file)
    assert second.output_dir == Path("runs/small")
    del first
    gc.collect()
    assert not (file.parent / "runs" / "small").exists()
    assert os.listdir("runs/small") == ["experiment.yaml"]
    second.train()


@pytest.mark.thorough
def test_commands_use_the_newest_run_or_the_given_folder(file, capsys):
    run("train", file, capsys=capsys)
    run("train", file, "--model.width=7", capsys=capsys)
    assert run("evaluate", file, "--model.width=7", capsys=capsys)[0] == 0
    assert run("predict", "runs/small-run2", capsys=capsys)[0] == 0  # with the width that it was trained with
    assert run("test", "runs/small", capsys=capsys)[0] == 0
    written = {name: {path.name for path in Path("runs", name).iterdir()} for name in folders()}
    assert written["small-run2"] - written["small"] == {"evaluation_eval.json", "predictions"}
    assert written["small"] - written["small-run2"] == {"tests"}
    code, _, errors = run("train", "runs/small", capsys=capsys)
    assert (code, "runs/small is the folder of a run. Add --resume latest to continue it" in errors) == (2, True)
    assert run("train", "runs/small", "--resume=latest", "--train.num_epochs=3", capsys=capsys)[0] == 0
    assert (epochs_in("runs/small"), epochs_in("runs/small-run2")) == ([1, 2, 3], [1, 2])
    assert run("train", "runs/small/experiment.yaml", capsys=capsys)[0] == 0  # repeats it
    assert (folders()[1:], epochs_in("runs/small-run3")) == (["small-run2", "small-run3"], [1, 2, 3])


@pytest.mark.thorough
def test_a_run_resumes_in_the_folder_that_its_state_is_in(file, capsys):
    run("train", file, capsys=capsys)
    run("train", file, capsys=capsys)
    later = contents("runs/small-run2")
    assert run("train", file, f"--resume=runs/small/{STATE}", "--train.num_epochs=3", capsys=capsys)[0] == 0
    assert epochs_in("runs/small") == [1, 2, 3]
    assert run("train", file, "--output_dir=runs/other", f"--resume=runs/small/{STATE}", capsys=capsys)[0] == 0
    run("train", file, "--output_dir=runs/other", f"--resume=runs/small/{STATE}", capsys=capsys)
    assert folders() == ["other", "other-run2", "small", "small-run2"]
    assert contents("runs/small-run2") == later


def test_a_run_that_never_begins_leaves_no_folder(file):
    first, second = (Experiment.from_file(file) for _ in range(2))
    assert len(first.train_dataset) == 24
    assert not Path("runs").exists()
    assert [str(each.output_dir) for each in (first, second)] == ["runs/small", "runs/small-run2"]
    second.train()
    del first
    gc.collect()
    assert folders() == ["small-run2"]
    with pytest.raises(ValueError, match="num_epochs=0 must be at least 1"):
        Experiment.from_file(file, {"train.num_epochs": 0}).train()
    gc.collect()
    assert folders() == ["small-run2"]
    assert str(Experiment.from_file(file, {"train.resume_from": "latest"}).output_dir) == "runs/small-run2"


@pytest.mark.thorough
@pytest.mark.processes
@pytest.mark.programs
def test_several_processes_agree_on_the_folder(file):
    folder = Path.cwd()

    def train(*options: str) -> None:
        os.chdir(folder)
        run_elastic(2, main, ["train", str(file), *options])

    for options in ((), (), ("--resume=latest", "--train.num_epochs=3")):
        done = run_forked(lambda options=options: train(*options))
        assert done.returncode == 0, done.stdout
    assert folders() == ["small", "small-run2"]
    assert [epochs_in(f"runs/{name}") for name in folders()] == [[1, 2], [1, 2, 3]]


def test_a_folder_of_runs_of_a_run_or_of_states_is_listed(file, capsys):
    run("train", file, capsys=capsys)
    run("train", file, "--optimizer.lr=0.1", capsys=capsys)
    code, printed, _ = run("inspect", "runs", capsys=capsys)
    assert code == 0
    assert printed.startswith("2 runs; the best of each column is marked with *\n\n")
    assert re.search(r"^small-run2 +0\.1$", printed, re.MULTILINE)
    states = [line for line in printed.splitlines() if "update-" in line]
    assert re.fullmatch(rf"runs/small/{STATE}: epoch 1, update 3, saved [\d-]+ [\d:]+", states[0])
    assert len(states) == 4
    of_run = run("inspect", "runs/small", capsys=capsys)[1]
    assert of_run.startswith("run    epochs  eval_loss_epoch (min)")
    of_states = run("inspect", "runs/small/training_states", capsys=capsys)[1]
    assert of_run.endswith(f"\n\n{of_states}")
    assert of_states.count("update-") == 2
    Path("empty").mkdir()
    code, _, errors = run("inspect", "empty", capsys=capsys)
    assert (code, "'empty' is not a training state: it has no manifest.json." in errors) == (2, True)
    Path("runs/small/run.json").write_text("{")
    code, _, errors = run("inspect", "runs", capsys=capsys)
    assert (code, "runs/small/run.json is not JSON" in errors) == (2, True)
