"""The time to the first batch of a shuffled epoch, and its memory, by number of samples.

python -m benchmarks.order [--samples 1000000 100000000]

Each case runs in a fork of its own: a ``DataLoader`` by hand, and a trainer, with and without a seed. The data have a
length, and samples that are their indices. Memory is what the peak of the process grows by.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from pytorch_accel_lite import Trainer, TrainerCallback

LARGEST_BY_HAND = 10**7  # it makes a list of all indices: ten times as many take gigabytes


class Numbers(Dataset[Any]):
    """Samples that are their indices."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((1,), index / self.size), torch.zeros(1)


class FirstStep(TrainerCallback):
    """Notes when the first batch is there."""

    seconds = 0.0

    def on_train_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
        self.begin = time.perf_counter()

    def on_train_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
        self.seconds = self.seconds or time.perf_counter() - self.begin


def by_hand(size: int) -> float:
    """Return the seconds until a ``DataLoader`` gives its first batch."""
    begin = time.perf_counter()
    next(iter(DataLoader(Numbers(size), 32, shuffle=True)))
    return time.perf_counter() - begin


def by_trainer(size: int, seed: int | None = None) -> float:
    """Return the seconds until a trainer has its first batch."""
    model = nn.Linear(1, 1)
    first = FirstStep()
    trainer = Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), callbacks=[first], seed=seed)
    kwargs = {"num_workers": 0}
    trainer.train(Numbers(size), max_num_train_steps=3, per_device_batch_size=32, train_dataloader_kwargs=kwargs)
    return first.seconds


def measured(action: Callable[[], float]) -> tuple[float, float]:
    """Return the seconds of an action and the megabytes by which it makes a process grow, in a fork."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        try:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            seconds = action()
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
            os.write(writer, f"{seconds} {grown}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        seconds, grown = map(float, answer.read().split())
    os.wait()
    return seconds, grown


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--samples", type=int, nargs="+", default=[10**6, 10**7, 10**8])
    torch.set_num_threads(1)
    by_trainer(64)  # imports what runs need
    print("| samples | | first batch | memory |\n|---|---|---|---|")
    for size in parser.parse_args().samples:
        cases: dict[str, Callable[[], float]] = {
            "`DataLoader` by hand": lambda size=size: by_hand(size),
            "trainer": lambda size=size: by_trainer(size),
            "trainer with a seed": lambda size=size: by_trainer(size, seed=0),
        }
        if size > LARGEST_BY_HAND:
            del cases["`DataLoader` by hand"]
        for name, action in cases.items():
            seconds, grown = measured(action)
            print(f"| {size:,} | {name} | {seconds:.3g} s | {grown:.0f} MB |", flush=True)


if __name__ == "__main__":
    main()
