"""Kill a run at random instants, start it again with the same command until it ends, and compare it to a whole one.

python -m tests.soak [--kills 100] [--processes 1] [--workers 0] [--asynchronous]

A state is saved at every update. Exits with an error when the killed run ends in other bits.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from tests.launching import ROOT, TORCHRUN, environment


def soak(
    folder: Path, kills: int, processes: int = 1, workers: int = 0, asynchronous: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what the killed run and the whole one ended with; fails unless there were so many kills."""
    epochs = max(3, kills // 2)
    start = [sys.executable] if processes == 1 else [*TORCHRUN, str(processes)]

    def command(target: Path, delay: float) -> list[str]:
        arguments = [1, workers, delay, epochs, int(asynchronous)]
        return [*start, "tests/scripts/resumable.py", str(target), *map(str, arguments)]

    whole, killed = folder / "whole", folder / "killed"
    for target in (whole, killed):
        target.mkdir()
    subprocess.run(command(whole, 0.0), env=environment(), cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    generator = torch.Generator().manual_seed(0)
    done = 0
    while not (killed / "final.pt").exists():
        done += _start_and_kill(command(killed, 0.05 if done < kills else 0.0), killed, done < kills, generator)
    assert done == kills, f"{done} kills instead of {kills}"
    return tuple(torch.load(target / "final.pt", weights_only=False) for target in (killed, whole))


def _start_and_kill(command: list[str], folder: Path, kill: bool, generator: torch.Generator) -> bool:
    """Start a run and kill it some time after its next state; return whether it was alive then."""
    process = subprocess.Popen(
        command, env=environment(), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    before = len(list(folder.glob("states/update-*")))
    while process.poll() is None and kill and len(list(folder.glob("states/update-*"))) == before:
        time.sleep(0.01)
    if kill:
        time.sleep(torch.rand(1, generator=generator).item() * 0.1)
    killed = kill and process.poll() is None
    if killed:
        process.kill()  # torchrun's ranks die with it
    output, _ = process.communicate(timeout=120)
    assert process.returncode in (0, -signal.SIGKILL), output
    return killed


def main() -> None:
    from tests.test_training_states import assert_same

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--asynchronous", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        assert_same(*soak(Path(folder), **vars(arguments)))
    print(f"{arguments.kills} kills: the same bits as the whole run")


if __name__ == "__main__":
    main()
