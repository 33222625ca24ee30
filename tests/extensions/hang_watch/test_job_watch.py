"""JobWatch: calls in which processes wait for others are reported, and a stuck job ends."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accel_lite import Trainer
from tests.deadlocks import DATA, fails_on_rank_1, on_rank_1, train
from tests.launching import PATIENCE, WarmPython, environment, in_forks, some_of
from tests.ranks import rank
from tests.small_models import float64_model, listener


class CatchesItsError(Trainer):
    """Skips a step on rank 1, for an error that only this rank has."""

    def calculate_train_batch_loss(self, batch: Any) -> Any:
        if rank() == 1 and self.progress.update == 2:
            return {"loss": torch.zeros((), dtype=torch.float64, requires_grad=True) * 1, "batch_size": 2}
        return super().calculate_train_batch_loss(batch)


class UsesMoreOnRank0(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both, self.one = float64_model(), float64_model()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.both(inputs) + (self.one(inputs) if rank() == 0 else 0)


def sweep() -> None:
    for _ in range(2):
        with suppress(OSError):
            train(callbacks=[on_rank_1("on_train_step_end", fails_on_rank_1, update=2)])


HANGS: dict[str, Callable[[], None]] = {
    "a step that catches its error": lambda: train(kind=CatchesItsError),
    "a parameter of one rank": lambda: train(UsesMoreOnRank0()),
    "a call before the backward pass": lambda: train(
        callbacks=[on_rank_1("on_train_step_start", lambda trainer: trainer.evaluate(DATA), update=2)]
    ),
}


@pytest.mark.processes
@pytest.mark.soak
@pytest.mark.parametrize("case", some_of(HANGS))
def test_processes_in_different_calls_report_and_end(tmp_path, monkeypatch, case):
    monkeypatch.setenv("PT_ACC_HANG_SECONDS", "1")
    output = tmp_path / "output"
    codes = in_forks(lambda rank: HANGS[case](), output, 2)
    said = output.read_text()
    assert codes[0] == 75, said
    assert codes[1] in (1, 75), said
    assert re.search(
        r"Rank \d has waited for the other processes for \d+ seconds:\n  rank 0 waits, epoch 1, step \d", said
    )
    assert re.search(r"rank 0 waits.* in train\(\), called by train of deadlocks.py:\d+ \(in the backward pass, ", said)
    assert re.search(r"\n  rank 1 waits, epoch 1, step \d", said)
    assert "All processes wait, but in different calls, so none can go on." in said
    assert "pass find_unused_parameters=True to the trainer" in said
    assert "The job ends with exit code 75." in said


@pytest.mark.processes
def test_a_rank_that_swallows_its_error_ends_the_job(tmp_path, monkeypatch):
    monkeypatch.setenv("PT_ACC_HANG_SECONDS", "1")
    output = tmp_path / "output"
    codes = in_forks(lambda rank: sweep(), output, 2)
    said = output.read_text()
    assert 0 not in codes, said
    assert "left the run" in said
    assert "OSError: no disk, in fails_on_rank_1 of deadlocks.py:" in said or "exit code 75" in said


@pytest.mark.processes
def test_a_rank_that_works_for_long_is_named_only(tmp_path, monkeypatch):
    monkeypatch.setenv("PT_ACC_HANG_SECONDS", "1")
    output, is_reported = tmp_path / "output", "has waited for the other processes"

    def work(trainer: Any) -> None:
        """Go on after two reports: a job that cannot go on ends with the second."""
        while output.read_text().count(is_reported) < 2 and trainer.progress.update == 2:
            time.sleep(0.05)

    goes_on = "Rank 0 no longer waits for the other processes."

    def until_said(rank: int) -> None:
        """Train, and leave the watch the time to look once more."""
        train(callbacks=[on_rank_1("on_train_step_start", work, update=2)])
        latest = time.monotonic() + 30
        while goes_on not in output.read_text() and time.monotonic() < latest:
            time.sleep(0.05)

    codes = in_forks(until_said, output, 2)
    said = output.read_text()
    assert codes == [0, 0], said
    assert re.search(r"\n  rank 1, epoch 1, step 2: in work of test_job_watch.py:\d+\n", said)
    assert goes_on in said


@pytest.mark.sampled
@pytest.mark.processes
@pytest.mark.parametrize(("leave", "words"), [
    (lambda trainer: sys.exit(0), r"Rank 1 has left the run: SystemExit: 0, in <lambda> of test_job_watch.py:\d+\."),
    (lambda trainer: os._exit(0), r"The process of rank 1 has ended without a word: it was killed, or called os._exit"),
    (fails_on_rank_1, r"Rank 1 has left the run: OSError: no disk, in fails_on_rank_1 of deadlocks.py:\d+\."),
], ids=["sys.exit", "os._exit", "error"])  # fmt: skip
@pytest.mark.parametrize("event", ["on_train_step_start", "on_train_epoch_end"])  # in the backward pass, or not
def test_the_others_say_which_process_has_left_and_why(tmp_path, leave, words, event):
    output = tmp_path / "output"
    codes = in_forks(lambda rank: train(callbacks=[on_rank_1(event, leave)]), output, 2)
    said = output.read_text()
    assert codes[0] == 1, said
    assert re.search(
        rf"ProcessLostError: Rank 0 cannot go on, because another process has left the job\. {words}", said
    )


FAILS_OUTSIDE_OF_RUNS = """
from tests.ranks import rank
from tests.small_models import make_trainer, train
trainer = make_trainer()
if rank() == 1:
    raise OSError("no disk")
train(trainer)
"""


@pytest.mark.processes
def test_the_others_say_that_an_error_outside_of_runs_is_why():
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2"}
    job["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    command = [sys.executable, "-c", FAILS_OUTSIDE_OF_RUNS]
    ranks = [environment(**job, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(2)]
    programs = [WarmPython(command, env=env, stderr=subprocess.PIPE, text=True) for env in ranks]
    said, _ = [program.communicate(timeout=PATIENCE)[1] for program in programs]
    assert "another process has left the job. Rank 1 has left the program: OSError: no disk.\n" in said


@pytest.mark.processes
def test_the_end_of_the_process_that_serves_messages_is_named(tmp_path):
    def fail(trainer: Any, **_: Any) -> None:
        if rank() == 0:
            raise OSError("no disk")

    def train_served_by_first(rank: int) -> None:
        torch.distributed.init_process_group("gloo")
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        train(callbacks=[listener(on_train_step_start=fail)])

    output = tmp_path / "output"
    assert in_forks(train_served_by_first, output, 2) == [1, 1]
    assert "The process of rank 0 has ended. Its own output says why, unless it was killed." in output.read_text()


def test_the_time_of_the_watch_is_checked(two_ranks, tmp_path, monkeypatch):
    monkeypatch.setenv("PT_ACC_HANG_SECONDS", "soon")
    output = tmp_path / "output"
    assert in_forks(lambda rank: train(), output, 2) == [1, 1]
    assert "PT_ACC_HANG_SECONDS='soon' must be a number of seconds" in output.read_text()
