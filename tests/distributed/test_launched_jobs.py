"""Launched programs: they train as one process does, exit cleanly, and end with the error of the rank that failed."""

from __future__ import annotations

import re
import runpy
import sys

import pytest
import torch

from tests.launching import TORCHRUN, launch, only_with_soak, run_script
from tests.small_models import adamw_trainer, float64_data, float64_model, largest_difference, weights

pytestmark = pytest.mark.processes

ACCELERATE = [
    *(sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"),
    *("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"),
]
LAUNCHERS = {"torchrun": [*TORCHRUN, "2"], "accelerate": ACCELERATE}


def test_two_processes_of_a_notebook_train_as_one_process_does(tmp_path):
    run_script("tests/scripts/notebook.py", str(tmp_path))
    results = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in range(2)]
    assert [result["processes"] for result in results] == [2, 2]
    model = float64_model()
    kwargs = {"per_device_batch_size": 6, "train_dataloader_kwargs": {"shuffle": False}}
    adamw_trainer(model).train(float64_data(30), 2, **kwargs)
    assert all(largest_difference(result["weights"], weights(model)) < 1e-10 for result in results)


def test_a_failing_rank_ends_the_job_with_its_traceback():
    done = launch([*TORCHRUN, "2", "tests/scripts/failing_rank.py"], warm=True)
    assert done.returncode != 0
    assert "sample 7 cannot be read" in done.stderr
    assert "in __getitem__" in done.stderr
    assert "Root Cause" in done.stderr, done.stderr
    summary = done.stderr.split("Root Cause")[1]
    assert "sample 7 cannot be read" in summary
    assert "in __getitem__" in summary


@only_with_soak
@pytest.mark.parametrize("rank", "01")
@pytest.mark.parametrize("how", ["caught", "exits"])
def test_a_rank_that_leaves_a_run_by_sys_exit_ends_the_job(how, rank):
    """Also if it has caught its error, so that no traceback is printed."""
    done = launch([*TORCHRUN, "2", "tests/scripts/failing_rank.py", how, rank], warm="launcher")
    assert done.returncode != 0
    assert done.stdout.count("has caught: sample") >= (how == "caught")
    cause = done.stderr.split("Root Cause")[1]
    assert re.search(rf"rank +: {rank} .*\n.* exitcode +: 3 ", cause), done.stderr


def test_the_signal_that_killed_a_rank_is_the_root_cause():
    rarely = "--monitor-interval=1"  # the launcher looks at the ranks, which leaves the other the time to fail
    done = launch([*TORCHRUN, "2", rarely, "tests/scripts/failing_rank.py", "killed"], warm=True)
    assert "Signal 9 (SIGKILL)" in done.stderr.split("Root Cause")[1]


@pytest.mark.extension("pytorch_accelerated")
@only_with_soak
@pytest.mark.parametrize("how", ["closed", "by itself"])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_launched_run_exits_with_0_however_it_is_closed(launcher, how):
    for _ in range(20):
        done = launch([*LAUNCHERS[launcher], "tests/scripts/short_run.py", how])
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("two processes: True") == (4 if how == "closed" else 2)
        assert sorted(re.findall(r"the first: (True|False)", done.stdout)) == ["False", "True"]


def run_as_script(path: str, *arguments: str) -> None:
    """As ``torchrun path arguments`` does."""
    before = sys.argv
    sys.argv = [path, *arguments]
    try:
        runpy.run_path(path, run_name="__main__")
    finally:
        sys.argv = before


@pytest.mark.thorough
def test_the_first_example_runs_unchanged_on_two_processes(tmp_path, job):
    done = job(2).run(run_as_script, "examples/digits.py", "--epochs", "1", "--output", str(tmp_path))
    assert done.output.count("Test accuracy") == 1
    assert {file.name for file in tmp_path.iterdir()} == {"best_model.pt", "curves.png"}
