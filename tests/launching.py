"""Starting scripts on several processes of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]


class Results:
    """What each case returned on each rank: ``results["name"]`` is a list in rank order."""

    def __init__(self, by_rank: list[dict[str, Any]], output: str) -> None:
        self.by_rank = by_rank
        self.output = output
        self.world_size = len(by_rank)

    def __getitem__(self, case: str) -> list[Any]:
        values = [rank[case] for rank in self.by_rank]
        for value in values:
            if isinstance(value, Failed):
                raise AssertionError(f"case {case} failed on a rank:\n{value.text}")
        return values


class Failed:
    """What a case left behind that raised."""

    def __init__(self, text: str) -> None:
        self.text = text


def environment(**changes: str) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if k not in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_PORT")}
    env |= {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT)}
    return env | changes


def launch(command: list[str], timeout: float = 120, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=environment(**env), cwd=ROOT, timeout=timeout, text=True, capture_output=True, check=False
    )


def torchrun(processes: int, script: str, *arguments: str, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    return launch([*TORCHRUN, str(processes), script, *arguments], **kwargs)


def run_cases(processes: int) -> Results:
    """Run all of tests/scripts/cases.py on several processes, and check that there were so many."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = torchrun(processes, "tests/scripts/cases.py", folder, timeout=180)
        except subprocess.TimeoutExpired:  # a worker that is forked among threads may, rarely, never begin: once more
            done = torchrun(processes, "tests/scripts/cases.py", folder, timeout=180)
        assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        files = sorted(Path(folder).glob("rank*.pt"))
        assert len(files) == processes
        results = [torch.load(file, weights_only=False) for file in files]
    assert [result["world_size"] for result in results] == [processes] * processes
    return Results(results, done.stdout)
