"""Two machines, simulated by network namespaces, that share only an object store."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.launching import PATIENCE, ROOT, TORCHRUN, environment, launch, only_with_soak
from tests.networks import ADDRESSES, ip, namespace
from tests.scripts.resumable import final_state
from tests.small_models import assert_same


def start(machine: str, nodes: str, log: Path, *arguments: object) -> subprocess.Popen[bytes]:
    """Start torchrun on a machine, with one process."""
    rendezvous = [
        "--nnodes", nodes, "--nproc-per-node", "1", "--max-restarts", "9", "--monitor-interval", "0.2",
        "--rdzv-backend", "c10d", "--rdzv-id", "job", "--rdzv-endpoint", f"{ADDRESSES['a']}:29511",
        "--rdzv-conf", f"is_host={int(machine == 'a')},join_timeout=60,last_call_timeout=2,read_timeout=5",
        "--local-addr", ADDRESSES[machine],
    ]  # fmt: skip
    variables = {"ACCELERATE_USE_CPU": "true", "GLOO_SOCKET_IFNAME": f"eth-{machine}"}
    variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    command = ["ip", "netns", "exec", namespace(machine), sys.executable, "-m", "torch.distributed.run", *rendezvous]
    with log.open("ab") as output:
        return subprocess.Popen(
            [*command, "tests/scripts/on_machines.py", *map(str, arguments)],
            cwd=ROOT, env=environment(**variables), stdout=output, stderr=output,
        )  # fmt: skip


def wait_until(condition: Callable[[], Any], log: Path, seconds: float = PATIENCE) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, log.read_text()[-5000:]
        time.sleep(0.1)


def world_sizes(folder: Path) -> list[int]:
    """The number of processes that saved each state, in the order of updates."""
    manifests = sorted(folder.glob("states/update-*/manifest.json"))
    return [json.loads(path.read_text())["world_size"] for path in manifests]


@only_with_soak
@pytest.mark.programs
@pytest.mark.extension("hang_watch")
def test_two_machines_have_the_bits_of_two_processes_on_one(tmp_path, network):
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    done = launch([*TORCHRUN, "2", "tests/scripts/on_machines.py", str(folders[0])])
    assert done.returncode == 0, done.stderr
    log = tmp_path / "log"
    jobs = [start(machine, "2", log, folders[1]) for machine in ADDRESSES]
    assert [job.wait(PATIENCE) for job in jobs] == [0, 0], log.read_text()
    one, two = map(final_state, folders)
    assert two["processes"] == 2
    assert_same(two, one)


@only_with_soak
@pytest.mark.programs
@pytest.mark.extension("hang_watch")
def test_a_machine_that_reconnects_loses_no_sample(tmp_path, network):
    log = tmp_path / "log"
    folder = tmp_path / "run"
    folder.mkdir()
    jobs = [start(machine, "1:2", log, folder, 0.4) for machine in ADDRESSES]
    try:
        wait_until(lambda: 2 in world_sizes(folder), log)
        ip("-n", namespace("b"), "link", "set", "eth-b", "down")
        wait_until(lambda: 1 in world_sizes(folder), log)
        jobs[1].kill()
        jobs[1].wait()
        ip("-n", namespace("b"), "link", "set", "eth-b", "up")
        jobs[1] = start("b", "1:2", log, folder, 0.4)
        wait_until((folder / "final.pt").exists, log)
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    sizes = world_sizes(folder)
    changes = [size for size, before in zip(sizes, [None, *sizes], strict=False) if size != before]
    assert changes == [2, 1, 2]
    order = [index for step in final_state(folder)["order"] for index in step]
    epochs = [order[start : start + 24] for start in range(0, len(order), 24)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(24))] * 4
