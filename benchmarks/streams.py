"""What a step costs on several processes, by how these get their batches.

    torchrun --nproc_per_node 2 -m benchmarks.streams [--rounds 9] [--steps 60]

Every way trains the same model, in turns. The wall time of each block of ten steps is measured within the run, and the
table shows the lower quartile of all blocks, as other programs on the machine can only slow a block down. The loops by
hand take part twice: the ratio of the second, the control, shows how reliable the others are.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from pytorch_accel_lite import Trainer, TrainerCallback
from pytorch_accel_lite.data import OwnShard, ReadByAll

BATCH = 32
IN_BLOCK = 10


class Images(IterableDataset[Any]):
    """Images of 3 x 64 x 64 in memory, of which a stream has some."""

    def __init__(self, first: int, end: int, every: int = 1) -> None:
        self.range = range(first, end, every)
        self._images = torch.randn(256, 3, 64, 64, generator=torch.Generator().manual_seed(0))

    def __iter__(self) -> Iterator[Any]:
        return ((self._images[number % 256], number % 10) for number in self.range)


class Divisible(Images):
    """The same, of which each process reads its own."""

    def shard(self, rank: int, world_size: int) -> Divisible:
        return Divisible(rank, self.range.stop, world_size)


class Endless:
    """Ready batches, without a length."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


def make_model(images: bool) -> nn.Module:
    inputs = [nn.AvgPool2d(8), nn.Flatten()] if images else []
    return nn.Sequential(*inputs, nn.Linear(192 if images else 64, 64), nn.ReLU(), nn.Linear(64, 10))


class Blocks(TrainerCallback):
    """The seconds of each block of steps but the first, which warms up."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._steps = 0

    def on_train_step_end(self, trainer: Trainer | None = None, **kwargs: Any) -> None:
        self._steps += 1
        if self._steps % IN_BLOCK == 0:
            now = time.perf_counter()
            if self._steps > IN_BLOCK:
                self.seconds.append(now - self._begin)
            self._begin = now


def train_by_hand(batches: Iterable[Any], images: bool) -> list[float]:
    model = make_model(images)
    wrapped = DistributedDataParallel(model) if dist.is_initialized() else model
    optimizer, loss_func = torch.optim.SGD(model.parameters(), lr=1e-3), nn.CrossEntropyLoss()
    blocks = Blocks()
    for x, y in batches:
        loss_func(wrapped(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        blocks.on_train_step_end()
    return blocks.seconds


class OfLoader(Trainer):
    def create_train_dataloader(self, batch_size: int, train_dl_kwargs: Any = None) -> Any:
        return self.train_dataset


def train_with_trainer(batches: Any, images: bool) -> list[float]:
    model = make_model(images)
    blocks = Blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with contextlib.redirect_stdout(io.StringIO()):
        OfLoader(model, nn.CrossEntropyLoss(), optimizer, [blocks]).train(batches, 1)
    return blocks.seconds


def scattered(stream: Images, steps: int) -> Iterator[Any]:
    """Read on the first process, and scatter the batches of each step."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    reader = iter(DataLoader(stream, BATCH)) if rank == 0 else None
    for _ in range(steps):
        own = torch.empty(BATCH, 3, 64, 64), torch.empty(BATCH, dtype=torch.int64)
        parts = [None, None] if reader is None else map(list, zip(*islice(reader, world_size), strict=True))
        for tensor, part in zip(own, parts, strict=True):
            dist.scatter(tensor, part)
        yield own


def ways(steps: int, rank: int, world_size: int) -> dict[str, dict[str, Callable[[], list[float]]]]:
    """Return what is compared, by table and name; the first of each is what the others are compared with."""
    samples = steps * BATCH * world_size
    own, whole = Images(rank, samples, world_size), Images(0, samples)
    by_hand = partial(train_by_hand, DataLoader(own, BATCH), images=True)
    streams = {
        "by hand, own shards": by_hand,
        "by hand, own shards, again (control)": by_hand,
        "ours, own shards (`OwnShard`)": partial(train_with_trainer, OwnShard(DataLoader(own, BATCH)), images=True),
        "ours, divided (`shard`)": partial(train_with_trainer, DataLoader(Divisible(0, samples), BATCH), images=True),
        "ours, `ReadByAll`": partial(train_with_trainer, DataLoader(ReadByAll(whole), BATCH), images=True),
        "ours, read and dealt out by rank 0": partial(train_with_trainer, DataLoader(whole, BATCH), images=True),
    }
    if world_size > 1:
        streams["by hand, read by rank 0, `scatter`"] = lambda: train_by_hand(scattered(whole, steps), images=True)
    few = [(torch.randn(BATCH, 64), torch.randint(10, (BATCH,))) for _ in range(8)]
    ready = list(islice(cycle(few), 4 * steps))
    by_hand = partial(train_by_hand, ready, images=False)
    return {
        "streams of images": streams,
        "own ready batches": {
            "by hand": by_hand,
            "by hand again (control)": by_hand,
            "ours, a list": partial(train_with_trainer, ready, images=False),
            "ours, an iterable without a length": partial(train_with_trainer, Endless(ready), images=False),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--quick", action="store_true", help="a few steps only, to check that everything works")
    arguments = parser.parse_args()
    rounds, steps = (1, 3 * IN_BLOCK) if arguments.quick else (arguments.rounds, arguments.steps)
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    count = accelerator.num_processes
    for title, contenders in ways(steps, accelerator.process_index, count).items():
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(rounds):
            for name, train in contenders.items():
                accelerator.wait_for_everyone()
                seconds[name] += train()
        quick = {name: statistics.quantiles(values, n=4)[0] / IN_BLOCK for name, values in seconds.items()}
        base = next(iter(quick.values()))
        accelerator.print(
            f"| {title}, {count} process{'es' * (count > 1)} | microseconds a step | ratio |\n|---|---|---|"
        )
        for name, value in quick.items():
            accelerator.print(f"| {name} | {value * 1e6:.0f} | {value / base:.2f} |")
        accelerator.print()


if __name__ == "__main__":
    main()
