"""Where the time of a step goes: python -m benchmarks.gaps [loop|convnet] [--rounds 8].

The hand-written loop and the trainer alternate in one process, with time stamps before and after the forward pass, the
loss, the backward pass and the optimizer. Results are medians over all steps of all rounds, which other programs on the
machine hardly affect.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.report import footnote, in_rounds
from benchmarks.tasks import Task, make_task

PARTS = [
    "forward pass",
    "forward pass to loss",
    "loss",
    "loss to backward pass",
    "backward pass",
    "backward pass to optimizer",
    "optimizer",
    "optimizer to next forward pass",
]


def marked(marks: list[float], function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        marks.append(time.perf_counter())
        result = function(*arguments)
        marks.append(time.perf_counter())
        return result

    return call


def by_hand(task: Task, batches: list[Any]) -> list[float]:
    marks: list[float] = []
    model = task.make_model()
    optimizer = task.make_optimizer(model)
    model.forward = marked(marks, model.forward)  # type: ignore[method-assign]
    loss_func, backward, step = (marked(marks, f) for f in (task.loss_func, torch.Tensor.backward, optimizer.step))
    for inputs, targets in batches:
        backward(loss_func(model(inputs), targets))
        step()
        optimizer.zero_grad()
    return marks


def ours(task: Task, batches: list[Any]) -> list[float]:
    from pytorch_accel_lite import Trainer, get_default_callbacks
    from pytorch_accel_lite.optimizers.optimizer_steps import take_step

    marks: list[float] = []

    class Marked(Trainer):
        def create_train_dataloader(self, batch_size: int, train_dl_kwargs: Any = None) -> Any:
            return batches

        def backward_step(self, loss: torch.Tensor) -> None:
            backward(loss)

        def optimizer_step(self) -> None:
            step(self.optimizer)

    model = task.make_model()
    optimizer = task.make_optimizer(model)
    backward, step = marked(marks, torch.Tensor.backward), marked(marks, take_step)
    model.forward = marked(marks, model.forward)  # type: ignore[method-assign]
    trainer = Marked(model, marked(marks, task.loss_func), optimizer, get_default_callbacks(progress_bar=False))
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        trainer.train(task.dataset, 1, per_device_batch_size=task.batch_size)
    return marks


def gaps(marks: list[float]) -> list[list[float]]:
    """Return the times in microseconds of each part of a step, without the first steps."""
    passed = [1e6 * (after - before) for before, after in itertools.pairwise(marks)]
    return [passed[part + 10 * len(PARTS) :: len(PARTS)] for part in range(len(PARTS))]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gaps", description=__doc__)
    parser.add_argument("workload", nargs="?", choices=["loop", "convnet"], default="loop")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    task = make_task(arguments.workload)
    batches = task.batches()[: 20 if arguments.quick else None]
    found: dict[str, list[list[float]]] = {name: [[] for _ in PARTS] for name in ("plain loop", "ours")}
    for _ in range(arguments.rounds):
        for name, run in (("plain loop", by_hand), ("ours", ours)):
            for times, new in zip(found[name], gaps(run(task, batches)), strict=True):
                times += new
    medians = {name: list(map(statistics.median, times)) for name, times in found.items()}
    print("| microseconds | plain loop | ours |\n|---|---|---|")
    for part, hand, own in zip(PARTS, *medians.values(), strict=True):
        print(f"| {part} | {hand:.1f} | {own:.1f} |")
    hand, own = map(sum, medians.values())
    print(f"| a step | {hand:.1f} | {own:.1f} ({own / hand:.3f}) |")
    print(footnote(in_rounds(arguments.rounds), f"One thread, medians of {len(batches) - 10} steps of each round"))


if __name__ == "__main__":
    main()
