"""Kill a run at random instants, start it again with the same command until it ends, and compare it to a whole one.

python -m tests.soak [--kills 100] [--processes 1] [--logical 4] [--workers 0] [--asynchronous]

A state is saved at every update. Exits with an error when the killed run ends in other bits. With logical processes, it
is started again on a random number of real ones each time.
"""

from __future__ import annotations

import argparse
import signal
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from tests.launching import Fork, run_elastic
from tests.scripts.resumable import run_to_the_end


def soak(
    folder: Path,
    kills: int,
    processes: int = 1,
    workers: int = 0,
    asynchronous: bool = False,
    logical: int | None = None,
    run_whole: Callable[..., None] | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what the killed run and the whole one ended with; fails unless there were as many kills.

    :param run_whole: how to run it as a whole, where processes are there already
    """
    options: dict[str, Any] = {"workers": workers, "epochs": max(3, kills // 2), "asynchronous": asynchronous}
    if logical is not None:
        options |= {"logical": logical, "batch": 2}
    generator = torch.Generator().manual_seed(0)

    def start(target: Path, delay: float) -> Fork:
        run = partial(run_to_the_end, target, delay=delay, **options)
        count = processes if logical is None else int(torch.randint(1, logical + 1, (), generator=generator))
        return Fork(run if count == 1 else partial(run_elastic, count, run), folder / "output")

    whole, killed = folder / "whole", folder / "killed"
    for target in (whole, killed):
        target.mkdir()
    if run_whole is None:
        assert start(whole, 0.0).wait() == 0, (folder / "output").read_text()
    else:
        run_whole(whole, **options)
    done = 0
    while not (killed / "final.pt").exists():
        process = start(killed, 0.05 if done < kills else 0.0)
        if done < kills:
            done += _kill_after_a_state(process, killed, generator)
        assert process.wait() in (0, -signal.SIGKILL), (folder / "output").read_text()
    assert done == kills, f"{done} kills instead of {kills}"
    return tuple(torch.load(target / "final.pt", weights_only=False) for target in (killed, whole))


def _kill_after_a_state(process: Fork, folder: Path, generator: torch.Generator) -> bool:
    """Kill a run some time after its next state; return whether it was alive then."""
    before = len(list(folder.glob("states/update-*")))
    while process.poll() is None and len(list(folder.glob("states/update-*"))) == before:
        time.sleep(0.005)
    time.sleep(torch.rand(1, generator=generator).item() * 0.1)
    is_alive = process.poll() is None
    ranks = psutil.Process(process.pid).children(recursive=True) if is_alive else []
    process.kill()
    psutil.wait_procs(ranks, timeout=60)  # a launcher's ranks die with it, on a busy machine some time later
    return is_alive


def main() -> None:
    from tests.test_training_states import assert_same

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--asynchronous", action="store_true")
    parser.add_argument("--logical", type=int)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        assert_same(*soak(Path(folder), **vars(arguments)))
    print(f"{arguments.kills} kills: the same bits as the whole run")


if __name__ == "__main__":
    main()
