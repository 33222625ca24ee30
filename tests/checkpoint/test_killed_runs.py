"""Runs that are killed at any instant, and ranks and jobs that are restarted, end in the bits of an undisturbed run."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from pytorch_accel_lite import TrainerCallback
from pytorch_accel_lite.checkpoint import verify_state
from tests.launching import (
    CAN_SHARD,
    PATIENCE,
    ROOT,
    SOAK,
    TORCHRUN,
    WarmPython,
    die_at_file_operation,
    environment,
    in_forks,
    only_with_soak,
    run_elastic_script,
)
from tests.scripts.resumable import final_state, run, run_to_the_end, saved_states, script
from tests.small_models import adamw_trainer, assert_same, float64_model
from tests.soak import soak

pytestmark = pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*")


@only_with_soak
@pytest.mark.programs
@pytest.mark.parametrize(
    ("workers", "asynchronous", "evaluate_every"), [(0, False, "0.4 epochs"), (0, True, "10 samples"), (2, False, None)]
)
@pytest.mark.timeout(7200)
def test_sigkill_at_random_instants_leads_to_the_same_bits(tmp_path, workers, asynchronous, evaluate_every):
    """As tests/soak.py does."""
    how = {"workers": workers, "asynchronous": asynchronous, "evaluate_every": evaluate_every}
    found, expected = soak(tmp_path, 100, **how)
    assert_same(found, expected)


@pytest.mark.thorough
@pytest.mark.soak
@pytest.mark.programs
@pytest.mark.timeout(7200 if SOAK else 3600)
def test_sigkill_of_a_run_that_holds_data_in_attributes(tmp_path):
    """A short version of tests/soak.py --held; ``make soak`` makes it long, also on two processes."""
    for processes in (1, 2) if SOAK else (1,):
        (tmp_path / str(processes)).mkdir()
        found, expected = soak(tmp_path / str(processes), 50 if SOAK else 3, processes, held=True)
        assert_same(found, expected)


@only_with_soak
@pytest.mark.processes
@pytest.mark.timeout(7200)
def test_sigkill_of_two_processes_leads_to_the_same_bits(tmp_path, job):
    def run_whole(folder, **options):
        job(2).run(run_to_the_end, folder, **options)

    found, expected = soak(tmp_path, 100, processes=2, evaluate_every="2 updates", run_whole=run_whole)
    assert found["processes"] == 2
    assert_same(found, expected)


@only_with_soak
@CAN_SHARD
@pytest.mark.processes
@pytest.mark.timeout(7200)
def test_a_killed_sharded_run_resumes_remote_states_bit_for_bit(tmp_path, job):
    """One or both of two processes, which write their shards in the background."""

    def run_whole(folder, **options):
        job(2).run(run_to_the_end, folder, **options, timeout=3000)

    how = {"processes": 2, "asynchronous": True, "sharded_remotely": True}
    found, expected = soak(tmp_path, 50, **how, run_whole=run_whole)
    assert found["processes"] == 2
    assert_same(found, expected)


def is_running(pid: str) -> bool:
    """Whether a process is running; it may end in between."""
    with suppress(OSError):
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    return False


@pytest.mark.processes
def test_ranks_do_not_outlive_a_launcher_that_was_killed(tmp_path):
    tmp_path.joinpath("run").mkdir()
    command = [*TORCHRUN, "2", *script(tmp_path / "run", 1, 0, 0.2)]
    with WarmPython(command, env=environment(), cwd=ROOT, stdout=subprocess.DEVNULL) as launcher:
        while not list(tmp_path.glob("run/states/update-*")):
            time.sleep(0.05)
        ranks = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        assert len(ranks) == 2
        launcher.kill()
    deadline = time.monotonic() + PATIENCE
    while any(map(is_running, ranks)):
        assert time.monotonic() < deadline, "ranks go on without their launcher"
        time.sleep(0.05)


def test_a_state_killed_while_being_replaced_gets_its_name_back(tmp_path, capsys):
    run(tmp_path)
    newest = saved_states(tmp_path)[-1]
    waiting = newest.with_name(f".{newest.name}.previous")
    newest.rename(waiting)
    verify_state(newest)
    newest.rename(waiting)
    capsys.readouterr()
    run(tmp_path)
    assert "Nothing left to do: the run had finished" in capsys.readouterr().out
    assert saved_states(tmp_path)[-1] == newest


def test_a_fresh_run_keeps_a_state_killed_while_being_replaced(tmp_path):
    run(tmp_path)
    last = saved_states(tmp_path)[-1]
    last.rename(last.with_name(f".{last.name}.previous"))
    last.with_name(".update-000000099.tmp").mkdir()
    run(tmp_path, resume_from=None, epochs=1)
    assert last in saved_states(tmp_path)
    assert not list((tmp_path / "states").glob(".update*"))


class DiesAtFileOperation(TrainerCallback):
    """Dies at a file operation, counted once the ranks have connected; before, the launcher would end the others."""

    def __init__(self, number: int) -> None:
        self.number = number

    def on_init_end(self, trainer, **kwargs):
        die_at_file_operation(self.number)


@pytest.mark.soak
@pytest.mark.programs
@pytest.mark.parametrize("asynchronous", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_sigkill_at_any_file_operation_leads_to_the_same_bits(tmp_path, asynchronous):
    """Kills at file operations, from the first file to the end of the second rotation.

    At every twenty-ninth; ``make soak`` kills at each.
    """
    kwargs: dict[str, Any] = {"max_checkpoints": 1, "save_every_n_steps": 3, "asynchronous": asynchronous}
    whole = run(tmp_path / "whole", **kwargs)
    for number in range(1, 200, 1 if SOAK else 29):
        folder = tmp_path / f"killed{number}"

        def killed(rank, folder=folder, number=number):
            die_at_file_operation(number)
            run(folder, **kwargs)

        (status,) = in_forks(killed, tmp_path / "output")
        assert status in (0, -signal.SIGKILL)
        assert_same(run(folder, **kwargs), whole)
        if status == 0:  # the run had fewer operations
            break
    assert number > 100


@pytest.mark.thorough
@pytest.mark.soak
@pytest.mark.processes
@pytest.mark.timeout(7200 if SOAK else 1800)
def test_sigkill_of_rank_0_at_any_file_operation_changes_no_bits(tmp_path):
    """Kills at every fifty-ninth operation; ``make soak`` at each."""
    kwargs: dict[str, Any] = {"max_checkpoints": 1, "save_every_n_steps": 3, "epochs": 2}

    def complete(folder: Path) -> dict[str, Any]:
        def finish(rank):
            result = run(folder, **kwargs)
            torch.save(result, folder / f"rank{rank}.pt")

        assert in_forks(finish, tmp_path / "output", 2) == [0, 0], (tmp_path / "output").read_text()
        return torch.load(folder / "rank0.pt", weights_only=False)

    whole = complete(tmp_path / "whole")
    assert whole["processes"] == 2
    kills = 0
    for number in range(1, 300, 1 if SOAK else 59):
        folder = tmp_path / f"killed{number}"

        def killed(rank, folder=folder, number=number):
            run(folder, extra=(DiesAtFileOperation(number if rank == 0 else sys.maxsize),), **kwargs)

        status, of_peer = in_forks(killed, tmp_path / "output", 2)
        assert_same(complete(folder), whole)
        if status == 0:
            break
        assert (status, of_peer) == (-signal.SIGKILL, 1)
        kills += 1
    assert kills >= 2


def test_a_restart_with_addresses_of_dead_ranks_is_warned_of(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.warns(UserWarning, match="Launch it with the environment variable TORCH_DISABLE_SHARE_RDZV_TCP"):
        adamw_trainer(float64_model())


@pytest.mark.thorough
@pytest.mark.processes
def test_a_job_restarts_by_itself_after_a_rank_was_killed(tmp_path, two_ranks, monkeypatch):
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    done = run_elastic_script(2, "tests/scripts/killed_ranks.py", str(tmp_path), max_restarts=3)
    assert done.returncode == 0, done.stdout
    assert "Resuming from" in done.stdout
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" not in done.stdout
    assert len(list(tmp_path.glob("killed*"))) == 2
    two_ranks.run(run_to_the_end, tmp_path / "whole")
    assert_same(final_state(tmp_path), final_state(tmp_path / "whole"))
