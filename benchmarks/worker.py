"""Run one contender on one workload, and print its times as one line of JSON."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks.contenders import CONTENDERS, is_missing
from benchmarks.tasks import make_task


@contextmanager
def counting_updates() -> Iterator[list[int]]:
    """Count the steps of all optimizers in a block, at the same cost for every contender."""
    counts = [0]

    def count(*_: object) -> None:
        counts[0] += 1

    hook = register_optimizer_step_post_hook(count)
    try:
        yield counts
    finally:
        hook.remove()


def measure(contender: str, workload: str, quick: bool) -> dict[str, object]:
    torch.set_num_threads(1)
    task = make_task(workload, quick)
    with tempfile.TemporaryDirectory() as folder:
        try:
            train = CONTENDERS[contender](task, Path(folder))
        except ModuleNotFoundError as error:
            if is_missing(error):
                return {"missing": error.name}
            raise
        with counting_updates() as counts:
            if workload == "first":  # measured from the start of the process
                wall, cpu = float(os.environ["STARTED_AT"]), 0.0
            else:
                warm_up()
                counts[0] = 0
                wall, cpu = time.time(), time.process_time()
            train()
            cpu, wall = time.process_time() - cpu, time.time() - wall
    if counts[0] != task.steps:
        raise RuntimeError(f"{contender} made {counts[0]} updates instead of {task.steps}.")
    return {"cpu": cpu / task.steps, "wall": wall / task.steps}


def warm_up() -> None:
    """Make torch load what it loads on first use."""
    task = make_task("loop", quick=True)
    CONTENDERS["by hand"](task, Path())()


if __name__ == "__main__":
    name, workload, mode = sys.argv[1:]
    print("\n" + json.dumps(measure(name, workload, mode == "quick")))
