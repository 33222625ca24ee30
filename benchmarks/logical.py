"""The cost of logical processes, against hand-written DDP with the same micro-batches: time, traffic and memory.

torchrun --standalone --nproc_per_node 2 -m benchmarks.logical [--rounds 9] [--updates 8] [--batch 16] [--quick]

Each update of both takes 8 batches: as 8 logical processes, and as 4 accumulated batches on each of 2 processes (8 on
one). They alternate in the same processes. Times are those on the CPU, which other programs disturb least, of updates
after the second one of a run: the median of the ratios of the rounds, with the minimum and maximum, and the ratio of
the fastest updates, which is about that of an idle machine. The control compares the hand-written loop with itself.
Traffic is what the sockets of a process send in an update. Memory is the largest resident size in an update, beyond
that of model, data and program, in copies of the gradients of a larger model. Traffic and memory are read as Linux
counts them.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import struct
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from benchmarks.report import footnote, in_rounds
from pytorch_accel_lite import Trainer, TrainerCallback

LOGICAL = 8


def convnet(quick: bool) -> nn.Module:
    """A residual network of ordinary size for small images: 0.3 million parameters."""
    torch.manual_seed(0)
    widths = [16, 32] if quick else [32, 64, 128]
    layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 3, padding=1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()]
    for before, after in zip([widths[0], *widths], widths, strict=False):
        for inputs, stride in ((before, 1 if before == after else 2), (after, 1)):
            layers += [nn.Conv2d(inputs, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))


def wide_model(quick: bool) -> nn.Module:
    """A model of four large matrices: 36 million parameters, of which each process has 144 MB of gradients."""
    width = 64 if quick else 3000
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(4)))


Train = Callable[[Callable[[], None]], Any]


def by_hand(
    model: nn.Module, loss_func: Any, create: Callable[..., Any], data: TensorDataset, batch: int, ranks: int
) -> Train:
    """Return an epoch of the loop that one would write, with accumulated gradients, which calls back after updates."""
    optimizer = create(model.parameters())
    steps = LOGICAL // ranks
    wrapped = DistributedDataParallel(model) if ranks > 1 else model

    def train(after_update: Callable[[], None]) -> None:
        sampler: Any = DistributedSampler(data) if ranks > 1 else None
        loader = DataLoader(data, batch, sampler=sampler, shuffle=None if sampler else True)
        for number, (inputs, targets) in enumerate(loader, 1):
            is_last = number % steps == 0
            with nullcontext() if is_last or ranks == 1 else wrapped.no_sync():
                (loss_func(wrapped(inputs), targets) / steps).backward()
            if is_last:
                optimizer.step()
                optimizer.zero_grad()
                after_update()

    return train


class _AfterUpdates(TrainerCallback):
    def __init__(self) -> None:
        self.call: Callable[[], None] = lambda: None

    def on_update_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self.call()


def ours(
    model: nn.Module,
    loss_func: Any,
    create: Callable[..., Any],
    data: TensorDataset,
    batch: int,
    ranks: int,
    logical: int | None = None,
) -> Train:
    """Return an epoch of a trainer."""
    callback = _AfterUpdates()
    trainer = Trainer(model, loss_func, create(model.parameters()), [callback], seed=0, logical_processes=logical)
    steps = 1 if logical else LOGICAL // ranks

    def train(after_update: Callable[[], None]) -> None:
        callback.call = after_update
        trainer.train(data, 1, None, batch, gradient_accumulation_steps=steps)

    return train


def bytes_sent() -> int:
    """Return what this process has sent over its TCP connections so far, as Linux counts it."""
    total = 0
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError, struct.error):  # not a TCP socket, or closed meanwhile
            if os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry))) as connection:
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                total += struct.unpack_from("Q", info, 200)[0]  # tcpi_bytes_sent
    return total


def resident(name: str) -> int:
    """Return the resident size of this process in bytes, now (``VmRSS``) or at most (``VmHWM``)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return 1024 * int(line.split()[1])


class Measurements:
    """What the updates of a run cost after the second one, before which a run is set up."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.sent: list[int] = []
        self.peak = 0
        self._updates = 0

    def after_update(self) -> None:
        """Note what an update has cost."""
        now, sent = time.process_time(), bytes_sent()
        self._updates += 1
        if self._updates > 2:
            self.seconds.append(now - self._before)
            self.sent.append(sent - self._sent)
            self.peak = max(self.peak, resident("VmHWM"))
        Path("/proc/self/clear_refs").write_text("5")  # the largest resident size begins again
        self._sent = sent
        self._before = time.process_time()


def measure_times(accelerator: Accelerator, batch: int, updates: int, rounds: int, quick: bool) -> None:
    """Print a table with the time and the traffic of an update of the residual network."""
    ranks = accelerator.num_processes
    size = LOGICAL * batch * updates
    data = TensorDataset(torch.randn(size, 3, 16, 16), torch.randint(10, (size,)))
    contenders = {
        "plain DDP loop": by_hand,
        "plain DDP loop again (control)": by_hand,
        "ours, accumulating": ours,
        f"ours, {LOGICAL} logical processes": partial(ours, logical=LOGICAL),
    }
    adamw = partial(torch.optim.AdamW, lr=1e-3)
    runs = {
        name: create(convnet(quick), nn.CrossEntropyLoss(), adamw, data, batch, ranks)
        for name, create in contenders.items()
    }
    found: dict[str, list[Measurements]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, train in runs.items():
            accelerator.wait_for_everyone()
            measured = Measurements()
            train(measured.after_update)
            if number:  # the first warms up
                found[name].append(measured)
    base = found["plain DDP loop"]
    fastest = min(min(m.seconds) for m in base)
    accelerator.print(
        f"| {ranks} processes, batches of {batch} | CPU time | of the fastest update | sent in an update |"
    )
    accelerator.print("|---|---|---|---|")
    for name, runs_of in found.items():
        ratios = [
            statistics.median(m.seconds) / statistics.median(of.seconds) for m, of in zip(runs_of, base, strict=True)
        ]
        spread = f"{statistics.median(ratios):.3f} ({min(ratios):.2f} to {max(ratios):.2f})"
        least = min(min(m.seconds) for m in runs_of) / fastest
        sent = statistics.median(statistics.median(m.sent) for m in runs_of) / 1e6
        accelerator.print(f"| {name} | {spread} | {least:.3f} | {sent:.2f} MB |")


def measure_memory(accelerator: Accelerator, quick: bool) -> None:
    """Print a table with the memory that an update of the wide model needs, in copies of the gradients."""
    ranks = accelerator.num_processes
    width = wide_model(quick)[0].in_features
    data = TensorDataset(torch.randn(4 * LOGICAL, width), torch.randn(4 * LOGICAL, width))
    contenders = {"plain DDP loop": by_hand, f"ours, {LOGICAL} logical processes": partial(ours, logical=LOGICAL)}
    accelerator.print(f"| {ranks} processes | memory of an update |\n|---|---|")
    for name, create in contenders.items():
        model = wide_model(quick)
        gradients = sum(parameter.nbytes for parameter in model.parameters())
        before = resident("VmRSS")
        measured = Measurements()
        create(model, nn.MSELoss(), partial(torch.optim.SGD, lr=1e-3), data, 1, ranks)(measured.after_update)
        accelerator.print(f"| {name} | {(measured.peak - before) / gradients:.2f} copies of the gradients |")
        accelerator.wait_for_everyone()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--updates", type=int, default=8)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    if arguments.updates < 3:
        parser.error(f"--updates {arguments.updates}: at least 3, as the first two are not measured")
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    measure_memory(accelerator, arguments.quick)
    measure_times(accelerator, arguments.batch, arguments.updates, arguments.rounds, arguments.quick)
    accelerator.print(footnote(in_rounds(arguments.rounds), f"{arguments.updates} updates in each"))


if __name__ == "__main__":
    main()
