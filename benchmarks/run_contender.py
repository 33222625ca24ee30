"""Run one contender on one workload, in turns with a plain loop, and print their times as one line of JSON.

The contender's model takes the turns: after each hundredth of its forward passes, it pauses while a plain loop makes
as many steps with a model of its own. Whatever else the machine does then slows down both alike.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks.contenders import CONTENDERS, Train, is_missing, loader_of
from benchmarks.tasks import Task, make_task

TURNS = 100
Times = tuple[float, float]  # seconds of CPU time, and of wall time


@contextmanager
def counting_updates() -> Iterator[list[int]]:
    """Count the steps of all optimizers in a block, at some cost for each."""
    counts = [0]

    def count(*_: object) -> None:
        counts[0] += 1

    hook = register_optimizer_step_post_hook(count)
    try:
        yield counts
    finally:
        hook.remove()


def check_updates(contender: str, train: Train, steps: int) -> None:
    """Train, and make sure that a contender makes the updates that it should."""
    with counting_updates() as counts:
        train()
    if counts[0] != steps:
        raise RuntimeError(f"{contender} made {counts[0]} updates instead of {steps}.")


def turns_by_hand(task: Task, steps: int) -> Iterator[Times]:
    """Train endlessly in a plain loop, yielding the times of each turn of this many steps."""
    model, loss_func, batches = task.make_model(), task.loss_func, loader_of(task)
    optimizer = task.make_optimizer(model)
    endless = chain.from_iterable(repeat(batches))
    model.train()
    while True:
        cpu, wall = time.thread_time(), time.perf_counter()
        for inputs, targets in islice(endless, steps):
            loss_func(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        yield time.thread_time() - cpu, time.perf_counter() - wall


class Turns:
    """The turns of a plain loop between those of a contender, as seen by the contender's model.

    What the contender's other threads do during a turn of the plain loop counts as the contender's. What it does before
    its second turn, and after the start of its last, does not count.
    """

    def __init__(self, task: Task, steps: int) -> None:
        self.turns, self.steps = turns_by_hand(task, steps), steps
        self.forwards = 0
        self.begins: list[Times] = []  # of the turns of the plain loop
        self.by_hand: list[Times] = []

    def each_forward(self) -> Iterator[None]:
        """Yield once for each forward pass of the contender, after a turn of the plain loop where one is due."""
        while True:
            self.begins.append((time.process_time(), time.perf_counter()))
            self.by_hand.append(next(self.turns))
            for _ in range(self.steps):
                self.forwards += 1
                yield

    def task(self, task: Task) -> Task:
        """Return a task whose models take turns with the plain loop. One of them is to be trained."""
        forwards = self.each_forward()

        def make_model() -> nn.Module:
            model = task.make_model()
            kind: Any = type(model)

            def forward(self: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
                next(forwards)
                return kind.forward(self, inputs)  # type: ignore[no-any-return]

            model.__class__ = type(kind.__name__, (kind,), {"forward": forward})  # a wrapper would take time
            return model

        return replace(task, make_model=make_model)

    def result(self) -> dict[str, float]:
        """Return the seconds of a step of both."""
        turns = self.by_hand[1:-1]
        cpu, wall = (sum(times) for times in zip(*turns, strict=True))
        all_cpu, all_wall = (end - begin for begin, end in zip(self.begins[1], self.begins[-1], strict=True))
        found = {"cpu": all_cpu - cpu, "wall": all_wall - wall, "cpu of plain loop": cpu, "wall of plain loop": wall}
        return {name: seconds / (self.steps * len(turns)) for name, seconds in found.items()}


def subfolder(folder: str, name: str) -> Path:
    made = Path(folder, name)
    made.mkdir()
    return made


def measure(contender: str, workload: str, quick: bool) -> dict[str, Any]:
    """Return the seconds of a step, and of one of the plain loop."""
    torch.set_num_threads(1)
    make: Callable[[Task, Path], Train] = CONTENDERS[contender]
    task = make_task(workload, quick)
    with tempfile.TemporaryDirectory() as folder:
        try:
            if workload == "first":  # measured from the start of the process
                check_updates(contender, make(task, Path(folder)), task.steps)
                return {"cpu": time.process_time(), "wall": time.time() - float(os.environ["STARTED_AT"])}
            few = make_task(workload, quick=True)
            check_updates(contender, make(few, subfolder(folder, "few")), few.steps)
            turns = Turns(task, max(1, task.steps // TURNS))
            make(turns.task(task), subfolder(folder, "all"))()
        except ModuleNotFoundError as error:
            if is_missing(error):
                return {"missing": error.name}
            raise
    if turns.forwards != task.steps:
        raise RuntimeError(f"{contender} made {turns.forwards} steps instead of {task.steps}.")
    return turns.result()


if __name__ == "__main__":
    name, workload, mode = sys.argv[1:]
    print("\n" + json.dumps(measure(name, workload, mode == "quick")))
