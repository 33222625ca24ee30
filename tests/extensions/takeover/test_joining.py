"""Jobs of several machines, and such that are made larger: what has come by ``launch --join``."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.extensions.takeover.test_takeover import LAUNCH, PROGRAM, Outcome, begin, end, kill, lives
from tests.launching import PATIENCE, ROOT, SOAK, TORCHRUN, WarmPython, environment
from tests.test_machines import ADDRESSES, ip, namespace, network  # noqa: F401

pytestmark = [pytest.mark.programs, pytest.mark.processes]


def address_of(job: subprocess.Popen[str]) -> str:
    """Where others can join a job, as it says."""
    assert job.stderr is not None
    line = job.stderr.readline()
    found = re.search(r"--join (\S+)", line)
    assert found is not None, line
    return found[1]


def join(address: str, processes: int, folder: Path) -> subprocess.Popen[str]:
    command = [*LAUNCH, "--join", address, "--processes", str(processes)]
    return WarmPython(command, cwd=folder, env=environment())


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def updates(folder: Path) -> Iterator[list[str]]:
    """What the processes note of each update: the number of the training, of the update, and of the processes."""
    for path in folder.glob("updates.*"):
        yield from (line.split() for line in path.read_text().splitlines())


def undisturbed(folder: Path, **config: Any) -> Outcome:
    outcome = end(begin(folder, 1, **config | {"pause": 0}), folder)
    assert outcome.code == 0, outcome.output
    return outcome


LONG = {"samples": 803, "pause": 0.03, "marks": True, "metrics": True}


@pytest.mark.soak
@pytest.mark.skipif(not SOAK, reason="takes most of a minute: make soak")
def test_a_job_is_made_larger_up_to_its_logical_processes(tmp_path):
    config = {**LONG, "trainings": 2, "epochs": 1}
    job = begin(tmp_path / "job", 2, "--listen", "127.0.0.1:0", **config)
    address = address_of(job)
    wait_for(lambda: any(training == "2" for training, *_ in updates(tmp_path / "job")))
    joined = join(address, 3, tmp_path)
    outcome = end(job, tmp_path / "job")
    assert joined.wait(PATIENCE) == outcome.code == 0, outcome.output
    assert "1 new process not let in: the run has 4 logical processes." in outcome.output
    assert [left for left, _, _ in outcome.changes] == [[]] * len(outcome.changes)
    assert [rank for _, came, _ in outcome.changes for rank in came] == [2, 3]
    whole = undisturbed(tmp_path / "whole", **config)
    assert outcome.results == whole.results * 4


@pytest.mark.soak
@pytest.mark.skipif(not SOAK, reason="takes a quarter of a minute: make soak")
def test_a_rank_of_torchrun_outlives_its_process(tmp_path):
    config = {**LONG, "samples": 203, "kills": kill(rank1="forward:6")}
    job = begin(tmp_path / "job", 0, "--listen", "127.0.0.1:0", "--begin-with", "2", **config)
    command = [*TORCHRUN, "2", "--no-python", *LAUNCH, "--join", address_of(job), "--processes", "1"]
    ranks = WarmPython(command, cwd=tmp_path, env=environment())
    outcome = end(job, tmp_path / "job")
    assert ranks.wait(PATIENCE) == outcome.code == 0, outcome.output
    assert "rank 1 was killed by SIGKILL. One process continued after" in outcome.output
    whole = undisturbed(tmp_path / "whole", **{**config, "kills": {}})
    assert outcome.results == whole.results


@pytest.mark.soak
@pytest.mark.skipif(not SOAK, reason="takes most of a minute: make soak")
def test_a_task_may_be_killed_with_its_processes(tmp_path):
    """As with srun --kill-on-bad-exit=0, which lets the other tasks live."""
    job = begin(tmp_path / "job", 0, "--listen", "127.0.0.1:0", "--begin-with", "3", **LONG)
    address = address_of(job)
    tasks = [join(address, count, tmp_path) for count in (1, 2)]
    wait_for(lambda: [*updates(tmp_path / "job")])
    tasks[1].kill()
    tasks[1].wait()
    outcome = end(job, tmp_path / "job")
    assert outcome.code == tasks[0].wait(PATIENCE) == 0, outcome.output
    assert re.search(r"which has left\. One process continued after", outcome.output)
    whole = undisturbed(tmp_path / "whole", **LONG)
    assert outcome.results == whole.results


def on(machine: str, log: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """Run the command on a machine."""
    command = ["ip", "netns", "exec", namespace(machine), *LAUNCH, *arguments]
    with log.open("ab") as output:
        return subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=output, stderr=output)


def cut(how: str) -> None:
    """Cut the machine off, or let it stand still."""
    if how == "link":
        ip("-n", namespace("b"), "link", "set", "eth-b", "down")
    elif how == "packets":
        qdisc("add", "netem", "loss", "100%")
    else:
        send_all(signal.SIGSTOP)


def mend(how: str) -> None:
    if how == "link":
        ip("-n", namespace("b"), "link", "set", "eth-b", "up")
    elif how == "packets":
        qdisc("del")
    else:
        send_all(signal.SIGCONT)


def qdisc(*arguments: str) -> None:
    verb, *kind = arguments
    command = ["tc", "-n", namespace("b"), "qdisc", verb, "dev", "eth-b", "root", *kind]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("packets cannot be dropped by tc here")


def send_all(number: int) -> None:
    """Send a signal to all processes of the machine."""
    command = ["ip", "netns", "pids", namespace("b")]
    for process in subprocess.run(command, check=True, capture_output=True, text=True).stdout.split():
        os.kill(int(process), number)


@pytest.mark.soak
@pytest.mark.skipif(not SOAK, reason="takes a minute: make soak")
@pytest.mark.parametrize("how", ["link", "packets", "frozen"])
def test_a_machine_that_is_cut_off_comes_back(tmp_path, network, how):  # noqa: F811
    config = {**LONG, "samples": 1603, "pause": 0.08}
    folder, log = tmp_path / "job", tmp_path / "log"
    folder.mkdir()
    address = f"{ADDRESSES['a']}:29400"
    options = ["--listen", address, "--processes", "2", "--begin-with", "4", "--patience", "10"]
    supervisor = on("a", log, *options, str(PROGRAM), json.dumps({"folder": str(folder), **config}))
    other = on("b", log, "--join", address, "--processes", "2")
    try:
        wait_for(lambda: len([*folder.glob("updates.*")]) == 4)
        before = {path.suffix[1:] for path in folder.glob("updates.*")}
        cut(how)
        wait_for(lambda: any(size == "2" for *_, size in updates(folder)))
        if how != "frozen":
            assert sum(map(lives, before)) == 2, "those that are cut off had ended when the others went on"
        mend(how)
        wait_for(lambda: len([*folder.glob("updates.*")]) == 6)
        assert supervisor.wait(PATIENCE) == 0, log.read_text()
        assert other.wait(PATIENCE) == 0, log.read_text()
    finally:
        for process in (supervisor, other):
            process.kill()
            process.wait()
    written = [json.loads(path.read_text()) for path in folder.glob("result.*.json")]
    whole = undisturbed(tmp_path / "whole", **config)
    assert [each["result"] for each in written] == whole.results * 4
    changes = min(written, key=lambda each: each["rank"])["changes"]
    assert changes[0] == [[2, 3], [], 2]
    assert [rank for _, came, _ in changes for rank in came] == [2, 3]
    assert "which gave no sign of life for 10 s" in log.read_text()
