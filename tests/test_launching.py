"""Starting the processes of a job: on which devices, with which results, and what is shown when one fails."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
from torch.distributed.launcher import api

pytest.importorskip("jsonargparse", reason="needs the extra cli")

from pytorch_accel_lite.experiment import Experiment, LaunchError, launch
from pytorch_accel_lite.experiment.command_line import main
from pytorch_accel_lite.experiment.launching import choose_devices
from pytorch_accel_lite.experiment.tested_weights import find_weights, load_weights
from tests import experiment_parts as parts
from tests.launching import ROOT, WarmPython, run_elastic, run_forked
from tests.test_experiments import FILE, STATES, assert_equal, weights

#: Number, load in percent, memory in use and in total.
GPUS = [(0, 96, 70_000, 80_000), (1, 0, 500, 80_000), (2, 3, 400, 80_000), (3, 0, 60_000, 80_000), (4, 0, 300, 80_000)]


@pytest.fixture
def list_gpus(tmp_path, monkeypatch) -> Callable[..., None]:
    """A machine whose driver lists GPUs."""

    def list_them(gpus: list[tuple[Any, ...]]) -> None:
        rows = [f"{number}, GPU-{number}{number}, {load}, {used}, {total}" for number, load, used, total in gpus]
        tool = tmp_path / "nvidia-smi"
        tool.write_text("#!/bin/sh\n" + "".join(f"echo {shlex.quote(row)}\n" for row in rows))
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return list_them


@pytest.fixture
def gpus(list_gpus) -> None:
    """Five GPUs, of which two are in use."""
    list_gpus(GPUS)


@pytest.mark.usefixtures("gpus")
def test_idle_devices_are_those_with_the_least_load_and_memory_in_use(monkeypatch):
    assert choose_devices("idle", None) == ["GPU-44"]
    assert choose_devices("idle", 3) == ["GPU-44", "GPU-11", "GPU-22"]
    assert choose_devices("3, 0", None) == choose_devices([3, 0], 2) == ["GPU-33", "GPU-00"]
    assert choose_devices(None, 2) is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0, 2, GPU-11")  # what a scheduler gave
    assert choose_devices("idle", 2) == ["GPU-11", "GPU-22"]
    with pytest.raises(ValueError, match=r"there is no GPU 4, only 0, 1, 2\."):
        choose_devices("4", None)


def test_values_that_the_driver_does_not_know_count_neither_way(list_gpus):
    """Those of the load on a GPU that is divided (MIG), or of the memory on one that shares the host's."""
    rows = [(0, "[N/A]", 70_000, 80_000), (1, "[N/A]", 400, 80_000), (2, 5, "[N/A]", "[Not Supported]")]
    list_gpus([*rows, (3, 8, 400, 80_000), (4, "[N/A]", "[N/A]", "[N/A]")])
    assert choose_devices("idle", 3) == ["GPU-33", "GPU-11", "GPU-22"]
    with pytest.raises(ValueError, match=r"3 idle .*GPU 2: load 5 %, memory unknown; .*; GPU 4: load unkn"):
        choose_devices("idle", 4)


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("devices", "processes", "error"),
    [
        ("idle", 4, "4 needed, 3 idle .GPU 0: load 96 %, memory 88 %; GPU 1: load 0 %, memory 1 %;"),
        ("7", None, "there is no GPU 7, only 0, 1, 2, 3, 4"),
        ("0,1", 3, "processes=3 does not fit devices='0,1'"),
        ("fast", None, "there is no GPU fast, only 0, 1, 2, 3, 4"),
    ],
)
def test_devices_that_there_are_not_are_refused(devices, processes, error):
    with pytest.raises(ValueError, match=error):
        choose_devices(devices, processes)


def test_without_a_gpu_none_is_idle(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(FILE)
    assert main(["train", "small.yaml", "--devices", "idle"]) == 2
    assert "error: devices='idle': too few idle GPUs: 1 needed, 0 idle (there is no GPU)." in capsys.readouterr().err
    assert main(["train", "small.yaml", "--processes", "2", "--train.epochs", "3"]) == 2  # before any is started
    assert "Did you mean 'num_epochs'?" in capsys.readouterr().err


def test_a_function_must_be_found_by_the_processes():
    def local() -> None: ...

    with pytest.raises(ValueError, match="must be defined at the top of a module"):
        launch(local, processes=2)
    with pytest.raises(ValueError, match="processes=0 must be at least 1"):
        launch(parts.own_rank, (9,), processes=0)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.programs
def test_a_function_runs_on_each_process_and_the_first_error_is_the_one_shown(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    names = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE")
    before = [os.environ.get(name) for name in names]
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    assert launch(parts.own_rank, (9,), processes=1) == [0]
    monkeypatch.setattr(api, "LaunchConfig", partial(api.LaunchConfig, start_method="fork"))  # imports nothing again
    with pytest.raises(LaunchError) as caught:
        launch(parts.own_rank, (1,), processes=2)
    assert caught.value.rank == 1
    text = str(caught.value)
    assert text.startswith("Rank 1 failed, and all processes were ended:\n\nTraceback")
    assert text.endswith("LookupError: on purpose, on rank 1 of 2")
    assert caught.value.reason == "on purpose, on rank 1 of 2"
    assert [os.environ.get(name) for name in names] == before
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)] == handlers


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.programs
def test_a_process_that_was_killed_is_said_to_be(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr(api, "LaunchConfig", partial(api.LaunchConfig, start_method="fork"))  # imports nothing again
    with pytest.raises(LaunchError, match=r"Rank \d was killed by SIGKILL, and all processes were ended\.") as caught:
        launch(parts.is_killed, processes=2)
    assert caught.value.exit_code == -signal.SIGKILL
    assert os.environ["OMP_NUM_THREADS"] == "3"


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.programs
def test_processes_of_the_command_line_end_in_the_bits_of_torchruns(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(subprocess_handler, "Popen", WarmPython, raising=False)  # older torch starts Python again
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(FILE)
    save = ["--callbacks+=SaveBestModelCallback", "--train.per_device_batch_size=4"]
    assert main(["train", "small.yaml", "--processes", "2", *save, "--output_dir=ours"]) == 0
    theirs = ["train", f"{tmp_path}/small.yaml", *save, f"--output_dir={tmp_path}/theirs"]
    done = run_forked(lambda: run_elastic(2, main, theirs))
    assert done.returncode == 0, done.stdout
    ours, theirs = (torch.load(f"{name}/best_model.pt", weights_only=True) for name in ("ours", "theirs"))
    for name, value in ours["model_state_dict"].items():
        assert torch.equal(value, theirs["model_state_dict"][name])


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.programs
def test_restarts_alone_start_a_process_again_after_a_failure(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(FILE)
    whole = Experiment.from_file("small.yaml", [*STATES, "--output_dir=whole"]).train()
    monkeypatch.setattr(subprocess_handler, "Popen", WarmPython, raising=False)  # older torch starts Python again
    crash = [*STATES, "--callbacks+=tests.experiment_parts.CrashAtFirst", "--callbacks.update=4", "--output_dir=again"]
    assert main(["train", "small.yaml", "--restarts", "1", *crash, "--resume", "latest"]) == 0
    last = Experiment.from_file("again").trainer
    load_weights(last, find_weights(last, "last"), Path("mean.pt"))
    assert_equal(weights(last), weights(whole))
