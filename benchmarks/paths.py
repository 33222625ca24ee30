"""The overhead of a step for common set-ups: python -m benchmarks.paths [--rounds 15] [--only seed].

The trainer and a hand-written loop over the same data take turns every 20 steps, in one process. Results are the lower
quartiles of the CPU times of these blocks, in microseconds per step: other programs on the machine can only slow a
block down, so the quicker ones show best what the code costs. The control compares the hand-written loop with itself,
and shows how reliable the other figures are.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice, repeat
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from benchmarks.tasks import Task, make_task
from pytorch_accel_lite import Trainer, get_default_callbacks
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from pytorch_accel_lite.data import OwnShard

STEPS_IN_BLOCK = 20
QUIET = get_default_callbacks(progress_bar=False)
Blocks = tuple[list[float], list[float]]


class Turns:
    """Lets a hand-written loop run after each block of a loop that calls this at each step, and times both."""

    def __init__(self, by_hand: Iterator[float], clock: Callable[[], float] = time.thread_time) -> None:
        self._by_hand = by_hand
        self._clock = clock
        self._steps = 0
        self.times: Blocks = [], []

    def __call__(self) -> None:
        if self._steps % STEPS_IN_BLOCK == 0:
            now = self._clock()
            if self._steps > STEPS_IN_BLOCK:  # not the first block, which warms up
                self.times[0].append(next(self._by_hand))
                self.times[1].append(now - self._begin)
            else:
                next(self._by_hand)
            self._begin = self._clock()
        self._steps += 1


class ReadyBatches:
    """A list of batches."""

    def __init__(self, task: Task, at_each: Callable[[], object]) -> None:
        self._batches = task.batches()
        self._at_each = at_each

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            self._at_each()
            yield batch

    def __len__(self) -> int:
        return len(self._batches)


class ReadsBatches(Dataset[Any]):
    """A dataset that reads a batch of samples at once."""

    def __init__(self, task: Task, at_each: Callable[[], object]) -> None:
        self.x, self.y = task.dataset.tensors  # type: ignore[attr-defined]
        self._at_each = at_each

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index]

    def __getitems__(self, indices: list[int]) -> Any:
        self._at_each()
        return self.x[indices], self.y[indices]


def nothing() -> None:
    pass


def collated(batch: Any) -> Any:
    return batch


class OfReadyBatches(Trainer):
    def create_train_dataloader(self, batch_size: int, train_dl_kwargs: Any = None) -> Any:
        return OwnShard(self.train_dataset)


def by_hand(
    task: Task,
    batches: Iterable[Any],
    clock: Callable[[], float] = time.thread_time,
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
) -> Iterator[float]:
    """Train endlessly, yielding the seconds of each block of steps.

    :param clock: tells the time, by default that of the CPU
    :param wrap: wraps the model
    """
    model = wrap(task.make_model())
    optimizer, loss_func = task.make_optimizer(model), task.loss_func
    endless = chain.from_iterable(repeat(batches))
    model.train()
    while True:
        begin = clock()
        for inputs, targets in islice(endless, STEPS_IN_BLOCK):
            loss_func(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        yield clock() - begin


def control(task: Task) -> Blocks:
    one, other = (by_hand(task, ReadyBatches(task, nothing)) for _ in range(2))
    pairs = [(next(one), next(other)) for _ in range(task.steps // STEPS_IN_BLOCK)]
    first, second = zip(*pairs[1:], strict=True)
    return list(first), list(second)


def ours(task: Task, reads: type[Any], callbacks: Iterable[Any], **kwargs: Any) -> Blocks:
    is_ready = reads is ReadyBatches
    options: dict[str, Any] = {"batch_size": task.batch_size, "shuffle": True, "collate_fn": collated}
    data = reads(task, nothing)
    turns = Turns(by_hand(task, data if is_ready else DataLoader(data, **options)))
    model = task.make_model()
    trainer_class = OfReadyBatches if is_ready else Trainer
    trainer = trainer_class(model, task.loss_func, task.make_optimizer(model), callbacks, **kwargs)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        trainer.train(
            reads(task, turns),
            1,
            per_device_batch_size=task.batch_size,
            train_dataloader_kwargs={"num_workers": 0, "collate_fn": collated},
        )
    return turns.times


def paths(task: Task, folder: str) -> dict[str, Callable[[], Blocks]]:
    """Return, by name, what compares the trainer with the hand-written loop over the same data."""

    def states() -> list[Any]:
        return [SaveTrainingStateCallback(folder, save_at_end=False)]

    return {
        "control": lambda: control(task),
        "list of batches": lambda: ours(task, ReadyBatches, []),
        "list of batches, default callbacks": lambda: ours(task, ReadyBatches, QUIET),
        "DataLoader": lambda: ours(task, ReadsBatches, []),
        "DataLoader, default callbacks": lambda: ours(task, ReadsBatches, QUIET),
        "DataLoader, seed": lambda: ours(task, ReadsBatches, [], seed=1),
        "DataLoader, training states": lambda: ours(task, ReadsBatches, states()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paths", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", help="only set-ups whose name contains this")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    task = make_task("loop")
    if arguments.quick:
        few = TensorDataset(*task.dataset[: 80 * task.batch_size])
        task = Task(task.make_model, task.make_optimizer, few, task.batch_size, 80, task.ready)
    with tempfile.TemporaryDirectory() as folder:
        chosen = {name: run for name, run in paths(task, folder).items() if arguments.only in name}
        found: dict[str, Blocks] = {name: ([], []) for name in chosen}
        for _ in range(arguments.rounds):
            for name, run in chosen.items():
                for times, new in zip(found[name], run(), strict=True):
                    times += new
    print("| path | by hand, microseconds per step | added by the trainer |\n|---|---|---|")
    for name, blocks in found.items():
        hand, own = (1e6 * statistics.quantiles(times, n=4)[0] / STEPS_IN_BLOCK for times in blocks)
        print(f"| {name} | {hand:.0f} | {own - hand:+.1f} |")


if __name__ == "__main__":
    main()
