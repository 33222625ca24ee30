"""Paths passed by users: invalid ones are refused early."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pytorch_accel_lite import callbacks
from pytorch_accel_lite.base.paths import as_file_name, is_place
from pytorch_accel_lite.callbacks import SaveBestModelCallback, SaveTrainingStateCallback
from pytorch_accel_lite.checkpoint import verify_state
from tests.small_models import make_trainer, train

extension = pytest.mark.extension

METRICS = pytest.param(
    lambda path: callbacks.MetricsFileCallback(path), "path", id="metrics", marks=extension("metrics_file")
)
LOG = pytest.param(lambda path: callbacks.RunLogCallback(path), "directory", id="log", marks=extension("reports"))
BEST = pytest.param(lambda path: SaveBestModelCallback(path, "train_loss_epoch"), "save_path", id="best")
PREDICTIONS = pytest.param(
    lambda path: callbacks.PredictionWriterCallback(path), "directory", id="predictions", marks=extension("predictions")
)
CHECKPOINT = pytest.param(lambda path: make_trainer().save_checkpoint(path), "save_path", id="checkpoint")
#: What writes to a file: how to call it, and its argument.
FILES = [
    METRICS,
    pytest.param(lambda path: callbacks.PlotMetricsCallback(path), "path", id="plot", marks=extension("reports")),
    BEST,
    pytest.param(
        lambda path: callbacks.ModelEmaCallback(save_path=path), "save_path", id="ema", marks=extension("model_ema")
    ),
    CHECKPOINT,
]
#: What writes to a folder, or reads.
OTHERS = [
    LOG,
    pytest.param(SaveTrainingStateCallback, "save_dir", id="states"),
    PREDICTIONS,
    pytest.param(
        lambda path: callbacks.ProfilerCallback(path), "output_dir", id="profile", marks=extension("profiling")
    ),
    pytest.param(
        lambda path: callbacks.NaNReportCallback(path), "directory", id="reports", marks=extension("nan_report")
    ),
    pytest.param(
        lambda path: callbacks.WSDCheckpointCallback(path), "save_dir", id="wsd", marks=extension("named_schedules")
    ),
    pytest.param(
        lambda path: callbacks.TrackerCallback(project_dir=path),
        "project_dir",
        id="tracker",
        marks=extension("trackers"),
    ),
    pytest.param(lambda path: make_trainer().save_training_state(path), "output_dir", id="state"),
    pytest.param(lambda path: make_trainer().load_checkpoint(path), "checkpoint_path", id="loaded"),
    pytest.param(lambda path: callbacks.read_predictions(path), "directory", id="read", marks=extension("predictions")),
]


@pytest.mark.sampled
@pytest.mark.parametrize("path", ["", "s3://", "file://", "file:///", "a\0b", "~nobody-of-this-name/x"])
@pytest.mark.parametrize(("write", "argument"), FILES + OTHERS)
def test_an_empty_path_is_refused(tmp_path, monkeypatch, write, argument, path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=rf"^{argument}=.* (names nothing to read|begins with a home)"):
        write(path)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(("write", "argument"), FILES)
def test_a_folder_is_refused_as_a_file_path(tmp_path, write, argument):
    for path in (tmp_path, f"{tmp_path}/new/", tmp_path / ".."):
        with pytest.raises(ValueError, match=rf"{argument}=.* is a folder, but should be a file"):
            write(path)


@pytest.mark.parametrize(("write", "argument"), [METRICS, LOG, BEST, PREDICTIONS, CHECKPOINT])
def test_a_path_below_a_file_is_refused(tmp_path, write, argument):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=rf"{argument}=.* lies below '.*file', which is not a folder"):
        write(tmp_path / "file" / "x.jsonl")
    with pytest.raises(ValueError, match=rf"{argument}=.* more than 255 bytes"):
        write(tmp_path / f"{'x' * 260}.jsonl")


@pytest.mark.extension("model_ema")
def test_the_home_directory_may_be_written_as_in_a_shell(tmp_path, monkeypatch):
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    best = SaveBestModelCallback("~/best.pt", "train_loss_epoch")
    states = SaveTrainingStateCallback("~/states")
    average = callbacks.ModelEmaCallback(save_path=Path("~/average.pt"), evaluate_during_training=False)
    train(make_trainer([best, states, average]))
    assert sorted(os.listdir("home")) == ["average.pt", "best.pt", "states"]
    assert os.listdir() == ["home"]
    make_trainer().load_checkpoint("~/best.pt")
    train(make_trainer([best, states, average]), 2, resume_from="~/states/update-000000003")
    (tmp_path / "~").mkdir()  # as earlier versions made it
    with pytest.raises(ValueError, match=r"save_dir='~/states' .* also a folder '~' here"):
        SaveTrainingStateCallback("~/states")


def test_the_longest_names_that_a_disk_allows_are_written(tmp_path):
    best = tmp_path / f"{'b' * 250}.pt"
    train(make_trainer([SaveBestModelCallback(best, "train_loss_epoch")])).save_training_state(tmp_path / ("s" * 255))
    assert {path.name for path in tmp_path.iterdir()} == {best.name, "s" * 255}
    verify_state(tmp_path / ("s" * 255))


@pytest.mark.parametrize(
    ("name", "expected"),
    [("val", "val"), ("a b", "a b"), ("", "%"), ("..", "%2E%2E"), ("../x", "..%2Fx"), ("/etc", "%2Fetc"), ("é", "é")],
)
def test_names_of_data_lead_to_no_other_folder(name, expected):
    assert as_file_name(name) == expected
    assert len(as_file_name(name * 500)) < 200


def test_different_names_lead_to_different_files():
    names = ["a/b", "a%2Fb", "a%252Fb", "", "%", "%25", "50%", "50%/x", "50%25%2Fx", "..", "%2E%2E"]
    assert len({*map(as_file_name, names)}) == len(names)
    assert as_file_name("50%") == "50%"


def test_an_argument_is_a_place_only_by_its_whole_name():
    assert all(map(is_place, ("path", "save_path", "save_dir", "directory", "log_files", "url", "logger")))
    assert not any(map(is_place, ("direction", "class_names", "profile", "pathology", "name", "folders_of", "device")))
