"""What a step costs on several processes, by how these get their batches.

    torchrun --nproc_per_node 2 -m benchmarks.streams [--rounds 9] [--steps 60]

Every way trains the same model, in turns. The times of each block of steps are measured within the run, and the table
shows the lower quartile of all blocks, as other programs on the machine can only slow a block down: wall time, and CPU
time of all processes and threads. A block has as many steps as the trainer's processes agree about at once, so each
includes an agreement. The plain loops take part twice: the ratio of the second, the control, shows how reliable the
others are. The last column compares with a plain loop that sends and promises the same.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from benchmarks.report import footnote, in_rounds
from pytorch_accel_lite import Trainer, TrainerCallback
from pytorch_accel_lite.data import OwnShard

BATCH = 32
IN_BLOCK = 16
Seconds = list[tuple[float, float]]
Ways = dict[str, tuple[Callable[[], Seconds], str]]


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
    """The seconds of each block of steps but the first, which warms up: wall time and CPU time of this process."""

    def __init__(self) -> None:
        self.seconds: list[tuple[float, float]] = []
        self._steps = 0

    def on_train_step_end(self, trainer: Trainer | None = None, **kwargs: Any) -> None:
        self._steps += 1
        if self._steps % IN_BLOCK == 0:
            wall, cpu = time.perf_counter(), time.process_time()
            if self._steps > IN_BLOCK:
                self.seconds.append((wall - self._begin[0], cpu - self._begin[1]))
            self._begin = wall, cpu


def train_by_hand(batches: Iterable[Any], images: bool, joined: bool = False) -> Seconds:
    """Train with a plain loop.

    Args:
        joined: let a process that has no batch left take part in the reductions of the others, with torch's ``Join``
    """
    model = make_model(images)
    wrapped = DistributedDataParallel(model) if dist.is_initialized() else model
    optimizer, loss_func = torch.optim.SGD(model.parameters(), lr=1e-3), nn.CrossEntropyLoss()
    blocks = Blocks()
    with Join([wrapped]) if joined else contextlib.nullcontext():  # type: ignore[list-item]
        for x, y in batches:
            loss_func(wrapped(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            blocks.on_train_step_end()
    return blocks.seconds


class OfLoader(Trainer):
    def create_train_dataloader(self, batch_size: int, train_dl_kwargs: Any = None) -> Any:
        return self.train_dataset


def train_with_trainer(batches: Any, images: bool) -> Seconds:
    model = make_model(images)
    blocks = Blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with contextlib.redirect_stdout(io.StringIO()):
        OfLoader(model, nn.CrossEntropyLoss(), optimizer, [blocks]).train(batches, 1, per_device_batch_size=BATCH)
    return blocks.seconds


class Agreed:
    """Batches about whose sizes the processes agree in each step, as cheaply as torch allows, and a step ahead."""

    def __init__(self, batches: Iterable[Any], group: Any) -> None:
        self._batches, self._group = batches, group

    def __iter__(self) -> Iterator[Any]:
        following = None
        for batch in self._batches:
            ready, following = following, (batch, *self._begin(len(batch[0])))
            if ready is not None:
                yield self._finish(*ready)
        yield self._finish(*following)  # type: ignore[misc]

    def _begin(self, size: int) -> tuple[torch.Tensor, Any]:
        number = torch.tensor(size)
        return number, dist.all_reduce(number, group=self._group, async_op=True)

    def _finish(self, batch: Any, number: torch.Tensor, work: Any) -> Any:
        work.wait()
        number.item()
        return batch


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


def of_streams(steps: int, rank: int, world_size: int) -> Ways:
    """Return the ways to feed images, by name, each with the plain loop that it is to be compared with."""
    samples = steps * BATCH * world_size
    own, whole = Images(rank, samples, world_size), Images(0, samples)
    shards = partial(train_by_hand, DataLoader(own, BATCH), images=True)
    ours = partial(train_with_trainer, images=True)
    by_hand, joined = "plain loop, own shards", "plain loop, own shards, `Join`"
    dealt = "plain loop, `scatter`"
    ways: Ways = {by_hand: (shards, by_hand), "plain loop, own shards, again (control)": (shards, by_hand)}
    if world_size > 1:
        ways[joined] = partial(shards, joined=True), joined
        ways[dealt] = lambda: train_by_hand(scattered(whole, steps), images=True), dealt
    return ways | {
        "ours, own shards (`OwnShard`)": (partial(ours, OwnShard(DataLoader(own, BATCH))), joined),
        "ours, divided (`shard`)": (partial(ours, DataLoader(Divisible(0, samples), BATCH)), joined),
        "ours, read and dealt out by rank 0": (partial(ours, DataLoader(whole, BATCH)), dealt),
    }


def of_ready_batches(steps: int, world_size: int) -> Ways:
    """Return the same for batches that need not be read."""
    few = [(torch.randn(BATCH, 64), torch.randint(10, (BATCH,))) for _ in range(8)]
    ready = list(islice(cycle(few), steps))
    train = partial(train_by_hand, ready, images=False)
    by_hand, joined, agreed = "plain loop", "plain loop, `Join`", "plain loop, an `all_reduce` of a number in each step"
    ways: Ways = {by_hand: (train, by_hand), "plain loop again (control)": (train, by_hand)}
    if world_size > 1:
        group = dist.new_group(backend="gloo")
        ways[agreed] = partial(train_by_hand, Agreed(ready, group), images=False), agreed
        ways[joined] = partial(train_by_hand, ready, images=False, joined=True), joined
    return ways | {
        "ours, a list": (partial(train_with_trainer, ready, images=False), by_hand),
        "ours, an iterable without a length": (partial(train_with_trainer, Endless(ready), images=False), joined),
    }


def quickest(seconds: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Return the lower quartiles of the wall time and the CPU time of all processes, by way."""
    found = {}
    for name, values in seconds.items():
        wall, cpu = torch.tensor(values, dtype=torch.float64).T
        if dist.is_initialized():
            dist.all_reduce(cpu)
        found[name] = wall.quantile(0.25).item() / IN_BLOCK, cpu.quantile(0.25).item() / IN_BLOCK
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=6 * IN_BLOCK)
    parser.add_argument("--quick", action="store_true", help="a few steps only, to check that everything works")
    arguments = parser.parse_args()
    rounds, steps = (1, 3 * IN_BLOCK) if arguments.quick else (arguments.rounds, arguments.steps)
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    count = accelerator.num_processes
    tables = {
        "streams of images": of_streams(steps, accelerator.process_index, count),
        "own ready batches": of_ready_batches(4 * steps, count),
    }
    for title, contenders in tables.items():
        seconds: dict[str, Seconds] = {name: [] for name in contenders}
        for _ in range(rounds):
            for name, (train, _) in contenders.items():
                accelerator.wait_for_everyone()
                seconds[name] += train()
        quick = quickest(seconds)
        base, base_cpu = next(iter(quick.values()))
        accelerator.print(
            f"| {title}, {count} process{'es' * (count > 1)} | microseconds a step | ratio | CPU time | "
            "to the plain loop that does the same |\n|---|---|---|---|---|"
        )
        for name, (wall, cpu) in quick.items():
            same = quick.get(contenders[name][1], (base, base_cpu))[0]
            ratios = wall / base, cpu / base_cpu, wall / same
            accelerator.print(f"| {name} | {wall * 1e6:.0f} | {' | '.join(f'{ratio:.2f}' for ratio in ratios)} |")
        # The first block of each round is not counted.
        blocks = len(next(iter(seconds.values()))) // rounds
        details = f"gloo, one thread for each process, {blocks} blocks of {IN_BLOCK} steps in each round"
        accelerator.print(footnote(in_rounds(rounds), details) + "\n")


if __name__ == "__main__":
    main()
