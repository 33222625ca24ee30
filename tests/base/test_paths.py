"""Paths passed by users: invalid ones are refused early, and no two runs write to the same place."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytorch_accel_lite import Trainer, callbacks
from pytorch_accel_lite.base.paths import as_file_name, is_place
from pytorch_accel_lite.callbacks import SaveBestModelCallback, SaveTrainingStateCallback
from pytorch_accel_lite.checkpoint import verify_state
from tests.small_models import listener, make_trainer, train

#: What writes to a path: how to make it, the argument, and whether the path is that of a file.
WRITERS: dict[str, tuple[Callable[[Any], Any], str, bool]] = {
    "metrics": (lambda path: callbacks.MetricsFileCallback(path), "path", True),
    "plot": (lambda path: callbacks.PlotMetricsCallback(path), "path", True),
    "log": (lambda path: callbacks.RunLogCallback(path), "directory", False),
    "best": (lambda path: SaveBestModelCallback(path, "train_loss_epoch"), "save_path", True),
    "ema": (lambda path: callbacks.ModelEmaCallback(save_path=path), "save_path", True),
    "states": (SaveTrainingStateCallback, "save_dir", False),
    "predictions": (lambda path: callbacks.PredictionWriterCallback(path), "directory", False),
    "profile": (lambda path: callbacks.ProfilerCallback(path), "output_dir", False),
    "reports": (lambda path: callbacks.NaNReportCallback(path), "directory", False),
    "wsd": (lambda path: callbacks.WSDCheckpointCallback(path), "save_dir", False),
    "tracker": (lambda path: callbacks.TrackerCallback(project_dir=path), "project_dir", False),
    "checkpoint": (lambda path: make_trainer().save_checkpoint(path), "save_path", True),
    "state": (lambda path: make_trainer().save_training_state(path), "output_dir", False),
    "loaded": (lambda path: make_trainer().load_checkpoint(path), "checkpoint_path", False),
    "read": (lambda path: callbacks.read_predictions(path), "directory", False),
}


def some(*names: str) -> Any:
    """Parametrize a test, without cases of deleted extensions."""
    owners = {
        "plot": "reports",
        "log": "reports",
        "reports": "nan_report",
        "tracker": "trackers",
        "metrics": "metrics_file",
        "ema": "model_ema",
    }
    owners |= {"wsd": "named_schedules", "profile": "profiling", "predictions": "predictions", "read": "predictions"}
    marks = {name: pytest.mark.extension(owner) for name, owner in owners.items()}
    return pytest.mark.parametrize("name", [pytest.param(name, marks=marks.get(name, ())) for name in names])


@pytest.mark.parametrize("path", ["", "s3://", "file://", "file:///", "a\0b", "~nobody-of-this-name/x"])
@some(*WRITERS)
def test_an_empty_path_is_refused(tmp_path, monkeypatch, name, path):
    monkeypatch.chdir(tmp_path)
    write, argument, _ = WRITERS[name]
    with pytest.raises(ValueError, match=rf"^{argument}=.* (names nothing to read|begins with a home)"):
        write(path)
    assert not any(tmp_path.iterdir())


@some(*(name for name, (_, _, is_file) in WRITERS.items() if is_file))
def test_a_folder_is_refused_as_a_file_path(tmp_path, name):
    write, argument, _ = WRITERS[name]
    for path in (tmp_path, f"{tmp_path}/new/", tmp_path / ".."):
        with pytest.raises(ValueError, match=rf"{argument}=.* is a folder, but should be a file"):
            write(path)


@some("metrics", "log", "best", "predictions", "checkpoint")
def test_a_path_below_a_file_is_refused(tmp_path, name):
    (tmp_path / "file").touch()
    write, argument, _ = WRITERS[name]
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


# ------------------------------------------------------------------------------------- two runs, one place


def try_to_lock(*files: Path) -> str:
    """The results of another process that locks the files."""
    code = (
        "import fcntl, sys\n"
        "for path in sys.argv[1:]:\n"
        "    try: fcntl.lockf(open(path, 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB); print('free')\n"
        "    except BlockingIOError: print('locked')"
    )
    return subprocess.run([sys.executable, "-S", "-c", code, *files], capture_output=True, text=True, check=True).stdout


@some("metrics", "log", "best", "states")
def test_two_runs_do_not_write_to_one_place(tmp_path, name):
    write, argument, _ = WRITERS[name]
    path = tmp_path / {"metrics": "m.jsonl", "best": "best.pt"}.get(name, name)
    lock = path / ".lock" if name == "states" else tmp_path / f".{path.name}.lock"

    def train_another(trainer: Trainer, **kwargs: Any) -> None:
        link = tmp_path / "link"
        link.symlink_to(tmp_path, target_is_directory=True)
        for same in (path, link / path.name):
            with pytest.raises(RuntimeError, match=r"nother run \(process \d+, which is this one\)") as caught:
                train(make_trainer([write(same)]))
            assert argument in str(caught.value)
        found.append(try_to_lock(lock))
        link.unlink()

    found: list[str] = []
    train(make_trainer([write(path), listener(on_train_epoch_end=train_another)]))
    assert found == ["locked\n"]  # what was refused has not freed it
    assert name == "states" or not lock.exists()
    train(make_trainer([write(path)]))


def test_runs_of_two_processes_cannot_write_to_the_same_file(tmp_path):
    code = (
        "import fcntl, sys, time\n"
        "file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX); file.write('4711'); file.flush()\n"
        "print('locked', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-S", "-c", code, tmp_path / ".best.pt.lock"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(RuntimeError, match=r"save_path=.*: another run \(process 4711\) .* another save_path"):
            train(make_trainer([WRITERS["best"][0](tmp_path / "best.pt")]))
        other.kill()
    train(make_trainer([WRITERS["best"][0](tmp_path / "best.pt")]))


def test_a_closed_copy_of_a_lock_does_not_free_it(tmp_path):
    lock = tmp_path / ".lock"
    found = []

    def copy(trainer: Trainer, **kwargs: Any) -> None:
        if trainer.progress.update == 1:
            lock.read_text()  # as shutil.copytree does; the system then frees it
        if trainer.progress.update == 2:
            found.append(try_to_lock(lock))

    states = SaveTrainingStateCallback(tmp_path, save_every_n_steps=1)
    train(make_trainer([states, listener(on_train_step_end=copy)]))
    assert found == ["locked\n"]


@pytest.mark.parametrize("plant", [os.symlink, os.link])
def test_a_lock_keeps_files_that_others_put_in_its_place(tmp_path, plant):
    (tmp_path / "states").mkdir()
    (tmp_path / "precious").write_text("mine")
    plant(tmp_path / "precious", tmp_path / "states" / ".lock")
    with pytest.raises(OSError, match=r"(Links are not followed|but is not one).*\.lock'"):
        train(make_trainer([SaveTrainingStateCallback(tmp_path / "states")]))
    assert (tmp_path / "precious").read_text() == "mine"


def test_an_argument_is_a_place_only_by_its_whole_name():
    assert all(map(is_place, ("path", "save_path", "save_dir", "directory", "log_files", "url", "logger")))
    assert not any(map(is_place, ("direction", "class_names", "profile", "pathology", "name", "folders_of", "device")))


def test_a_lock_that_cannot_be_written_is_not_held(tmp_path):
    resource = pytest.importorskip("resource")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limit[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            train(make_trainer([WRITERS["best"][0](tmp_path / "best.pt")]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, ignored)
    train(make_trainer([WRITERS["best"][0](tmp_path / "best.pt")]))
