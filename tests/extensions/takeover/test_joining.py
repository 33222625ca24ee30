"""Jobs on several machines, and processes that join by ``launch --join``."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.extensions.takeover.jobs import (
    ALL,
    LAUNCH,
    PROGRAM,
    Outcome,
    begin,
    check_equal,
    collect,
    end,
    kill,
    lives,
    report,
)
from tests.launching import CAN_SHARD, PATIENCE, ROOT, TORCHRUN, WarmPython, environment, only_with_soak
from tests.networks import ADDRESSES, ip, namespace

pytestmark = [pytest.mark.programs, pytest.mark.processes]


def address_of(job: subprocess.Popen[str]) -> str:
    """The address at which others can join a job, from its output."""
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
    """The records of the processes for each update: the training, the update, and the number of processes."""
    for path in folder.glob("updates.*"):
        yield from (line.split() for line in path.read_text().splitlines())


def undisturbed(folder: Path, **config: Any) -> Outcome:
    outcome = end(begin(folder, 1, **config | {"pause": 0}), folder)
    assert outcome.code == 0, outcome.output
    return outcome


LONG = {"samples": 803, "pause": 0.03, "marks": True, "metrics": True}


@only_with_soak
def test_a_job_is_made_larger_up_to_its_logical_processes(tmp_path):
    config = {**LONG, "pause": 0.2, "trainings": 2, "epochs": 1}  # long enough for others to start
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


@CAN_SHARD
@only_with_soak
def test_shard_replicas_on_other_machines_suffice(tmp_path, capfd):
    """The state for the restart is on the shared disk until all have resumed from it."""
    folder = tmp_path / "job"
    options = ["--listen", "127.0.0.1:0", "--processes", "2", "--begin-with", "4"]
    job = begin(folder, 0, *options, sharded="hsdp", kills=kill(rank1="evaluation:3"), marks=True, **ALL)
    joined = join(address_of(job), 2, tmp_path)
    outcome = end(job, folder)
    assert joined.wait(PATIENCE) == 0
    check_equal(outcome, undisturbed(tmp_path / "whole", **ALL), survivors=3)
    said = capfd.readouterr().out
    assert "others had the shards of each lost process, too. All go on from update 3." in said
    assert f"Resuming from '{folder / 'states'}" in said
    assert not [*folder.glob("states/.begin-again*")]
    before, after = [[update, 4] for update in range(1, 4)], [[update, 3] for update in range(4, 9)]
    assert sorted(outcome.marks) == [before, *[before + after] * 3]


@only_with_soak
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


@only_with_soak
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
    """Disconnect or suspend the machine."""
    if how == "link":
        ip("-n", namespace("b"), "link", "set", "eth-b", "down")
    elif how == "packets":
        queue("add", "pfifo", "limit", "0")  # which has no room for any packet
    else:
        send_all(signal.SIGSTOP)


def mend(how: str) -> None:
    if how == "link":
        ip("-n", namespace("b"), "link", "set", "eth-b", "up")
    elif how == "packets":
        queue("del")
    else:
        send_all(signal.SIGCONT)


def queue(verb: str, *kind: str) -> None:
    """Change how packets that leave a machine are queued, on both ends of the cable."""
    for machine in ADDRESSES:
        command = ["tc", "-n", namespace(machine), "qdisc", verb, "dev", f"eth-{machine}", "root", *kind]
        subprocess.run(command, check=True, capture_output=True)


def send_all(number: int) -> None:
    """Send a signal to all processes of the machine."""
    command = ["ip", "netns", "pids", namespace("b")]
    for process in subprocess.run(command, check=True, capture_output=True, text=True).stdout.split():
        os.kill(int(process), number)


@only_with_soak
@pytest.mark.parametrize("how", ["link", "packets", "frozen"])
def test_a_disconnected_machine_rejoins(tmp_path, network, how):
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


@only_with_soak
@pytest.mark.parametrize("first", ["a", "b"])
def test_network_cuts_do_not_change_the_results(tmp_path, network, first):
    """Five cuts, or FAULTS in the environment; the first rank may be on the disconnected machine."""
    config = {**ALL, "samples": 2003, "marks": True}
    whole = undisturbed(tmp_path / "whole", **config)
    for number in range(int(os.environ.get("FAULTS", 5))):
        folder = tmp_path / str(number)
        folder.mkdir()
        output = run_with_a_cut(folder, first, random.Random(f"{first}{number}"), config)
        outcome = collect(0, output, folder)
        check_equal(outcome, whole, survivors=len(outcome.results))
        assert re.search(r"new process(es)? joined", output), "those that were cut off have rejoined"
        report(f"cut networks, the first rank on {first}: {number + 1}")


def run_with_a_cut(folder: Path, first: str, drawn: random.Random, config: dict[str, Any]) -> str:
    """Run a job on both machines, of which b is cut off for a while, and return what it says.

    Args:
        first: the machine of the first rank
    """
    log = folder / "log.txt"
    program = [str(PROGRAM), json.dumps({"folder": str(folder), **config, "pause": 0.1})]
    address = f"{ADDRESSES['a']}:29400"
    started = [on("a", log, "--listen", address, "--begin-with", "4", "--patience", "6", *program)]
    try:
        wait_for(lambda: "others can join" in log.read_text())
        for machine in (first, *(ADDRESSES.keys() - {first})):
            started.append(on(machine, log, "--join", address, "--processes", "2"))
            wait_for(partial(has_joined, machine, 2))
        wait_for(lambda: len([*folder.glob("updates.*")]) == 4)
        time.sleep(drawn.uniform(0.0, 3.0))
        how = drawn.choice(["link", "packets"])
        cut(how)
        wait_for(lambda: "which gave no sign of life for 6 s" in log.read_text())
        time.sleep(drawn.uniform(0.0, 2.0))
        mend(how)
        assert started[0].wait(PATIENCE) == 0, log.read_text()
    finally:
        for process in started:
            process.kill()
            process.wait()
    return log.read_text()


def has_joined(machine: str, processes: int) -> bool:
    """Whether the processes of a machine have been started, besides its fork server."""
    command = ["ip", "netns", "pids", namespace(machine)]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return len(found) >= processes + 1 + (machine == "a")
