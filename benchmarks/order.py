"""The time to the first batch of a shuffled epoch, and its memory: python -m benchmarks.order --samples 1000000000.

See ``benchmarks.growth`` for other numbers of samples.
The data have a length, and samples that are their indices. Memory is what the peak of a process grows by.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset

from pytorch_accel_lite import Trainer, TrainerCallback
from pytorch_accel_lite.data import shard
from pytorch_accel_lite.distributed import Ranks

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
        self.begin = time.process_time()

    def on_train_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
        self.seconds = self.seconds or time.process_time() - self.begin


def by_hand(size: int) -> float:
    """Return the seconds of CPU time until a ``DataLoader`` gives its first batch."""
    begin = time.process_time()
    next(iter(DataLoader(Numbers(size), 32, shuffle=True)))
    return time.process_time() - begin


def by_trainer(size: int, seed: int | None = None) -> float:
    """Return the seconds of CPU time until a trainer has its first batch."""
    model = nn.Linear(1, 1)
    first = FirstStep()
    trainer = Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), callbacks=[first], seed=seed)
    kwargs = {"num_workers": 0}
    trainer.train(Numbers(size), max_num_train_steps=3, per_device_batch_size=32, train_dataloader_kwargs=kwargs)
    return first.seconds


def first_after(size: int, start: int) -> float:
    """Return the seconds of CPU time until an epoch that is resumed after some samples gives its first batch."""
    ranks, device = Ranks(Accelerator(cpu=True)), torch.device("cpu")
    begin = time.process_time()
    loader = shard(DataLoader(Numbers(size), 32, shuffle=True), ranks, device, seed=0, training=True)
    next(loader.steps(epoch=1, start=start))
    return time.process_time() - begin


def measured(action: Callable[[], float]) -> tuple[float, float]:
    """Return the seconds of CPU time of an action and the megabytes by which it makes a process grow, in a fork."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        try:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            seconds = action()
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
            os.write(writer, f"{seconds} {grown}".encode())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        seconds, grown = map(float, answer.read().split())
    os.wait()
    return seconds, grown


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.order", description=__doc__)
    parser.add_argument("--samples", type=int, default=10**9)
    size = parser.parse_args().samples
    by_trainer(100, seed=0)  # what a first run loads is not counted
    for what, action in {
        "from the start, with a seed": partial(by_trainer, size, seed=0),
        "resumed in the middle, with a seed": partial(first_after, size, size // 2),
    }.items():
        seconds, megabytes = measured(action)
        print(f"{size:,} samples, {what}: first batch after {1e3 * seconds:.0f} ms, {megabytes:.0f} MB")


if __name__ == "__main__":
    main()
