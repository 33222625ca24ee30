"""Locks on the outputs of a run: no two runs write to the same place."""

from __future__ import annotations

import gc
import io
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from pytorch_accel_lite import Trainer, TrainerCallback, callbacks
from pytorch_accel_lite.callbacks import SaveBestModelCallback, SaveTrainingStateCallback
from tests.launching import PATIENCE, WarmPython
from tests.scripts.resumable import run, saved_states
from tests.small_models import listener, make_trainer, train


def best_model(path: Path) -> SaveBestModelCallback:
    return SaveBestModelCallback(path, "train_loss_epoch")


def try_to_lock(*files: Path) -> str:
    """The results of another process that locks the files."""
    code = (
        "import fcntl, sys\n"
        "for path in sys.argv[1:]:\n"
        "    try: fcntl.lockf(open(path, 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB); print('free')\n"
        "    except BlockingIOError: print('locked')"
    )
    return subprocess.run([sys.executable, "-S", "-c", code, *files], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("write", "argument", "name", "lock"),
    [
        pytest.param(
            lambda path: callbacks.MetricsFileCallback(path),
            "path",
            "m.jsonl",
            ".m.jsonl.lock",
            id="metrics",
            marks=pytest.mark.extension("metrics_file"),
        ),
        pytest.param(
            lambda path: callbacks.RunLogCallback(path),
            "directory",
            "log",
            ".log.lock",
            id="log",
            marks=pytest.mark.extension("reports"),
        ),
        pytest.param(best_model, "save_path", "best.pt", ".best.pt.lock", id="best"),
        pytest.param(SaveTrainingStateCallback, "save_dir", "states", "states/.lock", id="states"),
    ],
)
def test_two_runs_do_not_write_to_one_place(tmp_path, write, argument, name, lock):
    path, lock = tmp_path / name, tmp_path / lock

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
            train(make_trainer([best_model(tmp_path / "best.pt")]))
        other.kill()
    train(make_trainer([best_model(tmp_path / "best.pt")]))


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


def test_a_lock_that_cannot_be_written_is_not_held(tmp_path):
    resource = pytest.importorskip("resource")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limit[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            train(make_trainer([best_model(tmp_path / "best.pt")]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, ignored)
    train(make_trainer([best_model(tmp_path / "best.pt")]))


def test_finished_runs_close_their_lock_files(tmp_path):
    trainer = make_trainer([SaveTrainingStateCallback(tmp_path)])
    for _ in range(3):
        train(trainer)

    def is_held() -> bool:
        # Neither isinstance() nor a name: one fails for a proxy of an object that is gone, one for a file of no buffer.
        files = [repr(found) for found in gc.get_objects() if type(found) is io.TextIOWrapper]
        return any(str(tmp_path / ".lock") in file for file in files)

    latest = time.monotonic() + PATIENCE
    while is_held() and time.monotonic() < latest:  # the threads that show that the runs are alive may be ending still
        time.sleep(0.01)
    assert not is_held()


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*")
def test_a_second_run_in_the_same_directory_is_refused(tmp_path):
    code = (
        "import fcntl, sys, time\n"
        "file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX); file.write('4711'); file.flush()\n"
        "print('locked', flush=True); time.sleep(3600)"
    )
    (tmp_path / "states").mkdir()
    command = [sys.executable, "-c", code, str(tmp_path / "states" / ".lock")]
    with WarmPython(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(RuntimeError, match=r"Another run \(process 4711\) .* another save_dir"):
            run(tmp_path)
        other.kill()
    run(tmp_path)


@pytest.mark.parametrize("resume_from", [None, "latest"])
def test_a_run_that_fails_early_releases_its_directory(tmp_path, resume_from):
    """In a notebook, the error keeps the trainer and its callbacks alive."""

    def fail(optimizer: torch.optim.Optimizer) -> None:
        raise RuntimeError("no schedule")

    def begin(**kwargs: Any) -> None:
        train(make_trainer([SaveTrainingStateCallback(tmp_path / "states")]), resume_from=resume_from, **kwargs)

    with pytest.raises(RuntimeError, match="no schedule") as kept:
        begin(create_scheduler_fn=fail)
    begin()
    assert kept.value.__traceback__ is not None


LOCKS = """
import sys
from pytorch_accel_lite.checkpoint.states.state_store import DirectoryStore

store = DirectoryStore(sys.argv[1])
store.lock()
print("locked", flush=True)
sys.stdin.readline()
"""


@contextmanager
def removed_and_locked(states: Path, update: int) -> Iterator[tuple[TrainerCallback, list[str]]]:
    """Yield a callback that removes the states after 5 updates, and starts a process that locks them after some.

    Also yield what that process answers: that it has locked them, or its error.
    """
    others: list[Any] = []
    answers: list[str] = []

    def interfere(trainer: Trainer, **kwargs: Any) -> None:
        if trainer.progress.update == 5:
            shutil.rmtree(states)
        if trainer.progress.update == update:
            pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
            others.append(WarmPython([sys.executable, "-c", LOCKS, str(states)], text=True, **pipes))
            answers.append(others[0].stdout.readline() or others[0].stderr.read())

    try:
        yield listener(on_train_step_end=interfere), answers
    finally:
        for other in others:
            other.kill()
            other.communicate()


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*")
def test_a_run_locks_a_removed_directory_again(tmp_path):
    """Otherwise two runs could save in one directory."""
    with removed_and_locked(tmp_path / "states", update=6) as (interferes, answers):
        run(tmp_path, extra=(interferes,))
    (answer,) = answers
    assert "Another run (process" in answer
    assert [int(path.name[-2:]) for path in saved_states(tmp_path)] == [5, 6, 7, 8, 9, 10, 11, 12]


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*")
def test_a_removed_directory_that_another_run_locks_is_refused(tmp_path):
    error = pytest.raises(RuntimeError, match=r"Another run \(process \d+\) .* another save_dir")
    with removed_and_locked(tmp_path / "states", update=5) as (interferes, answers), error:
        run(tmp_path, extra=(interferes,))
    assert answers == ["locked\n"]
    assert not saved_states(tmp_path)
