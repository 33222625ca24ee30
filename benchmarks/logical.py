"""The cost of logical processes, against hand-written DDP with the same micro-batches.

torchrun --standalone --nproc_per_node 2 -m benchmarks.logical [--rounds 9] [--updates 12] [--batch 16] [--quick]

Each update of both takes 8 batches: as 8 logical processes, and as 4 accumulated batches on each of 2 processes (8 on
one). They alternate in the same processes; results are medians of the ratios in a round, with the minimum and maximum,
of wall-clock time and of CPU time, which is more reliable on a busy machine. The control compares the hand-written loop
with itself.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from pytorch_accel_lite import Trainer

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


def by_hand(data: TensorDataset, batch: int, ranks: int, quick: bool) -> Callable[[], Any]:
    """Return an epoch of the loop that one would write, with accumulated gradients."""
    model = DistributedDataParallel(convnet(quick)) if ranks > 1 else convnet(quick)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss_func = nn.CrossEntropyLoss()
    sampler: Any = DistributedSampler(data) if ranks > 1 else None
    loader = DataLoader(data, batch, sampler=sampler, shuffle=None if sampler else True)
    steps = LOGICAL // ranks

    def train() -> None:
        for number, (inputs, targets) in enumerate(loader, 1):
            is_last = number % steps == 0
            with nullcontext() if is_last or ranks == 1 else model.no_sync():
                (loss_func(model(inputs), targets) / steps).backward()
            if is_last:
                optimizer.step()
                optimizer.zero_grad()

    return train


def ours(data: TensorDataset, batch: int, quick: bool, **kwargs: Any) -> Callable[[], Any]:
    """Return an epoch of a trainer."""
    model = convnet(quick)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trainer = Trainer(model, nn.CrossEntropyLoss(), optimizer, callbacks=[], seed=0, **kwargs)
    steps = 1 if kwargs else LOGICAL // trainer.ranks.world_size
    return lambda: trainer.train(data, 1, None, batch, gradient_accumulation_steps=steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--updates", type=int, default=12)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    ranks = accelerator.num_processes
    batch, quick = arguments.batch, arguments.quick
    size = LOGICAL * batch * arguments.updates
    data = TensorDataset(torch.randn(size, 3, 16, 16), torch.randint(10, (size,)))
    contenders = {
        "DDP by hand": by_hand(data, batch, ranks, quick),
        "DDP by hand again (control)": by_hand(data, batch, ranks, quick),
        "ours, accumulating": ours(data, batch, quick),
        f"ours, {LOGICAL} logical processes": ours(data, batch, quick, logical_processes=LOGICAL),
    }
    ratios: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for number in range(arguments.rounds + 1):
        seconds, on_cpu = {}, {}
        for name, train in contenders.items():
            accelerator.wait_for_everyone()
            begin, begin_on_cpu = time.perf_counter(), time.process_time()
            train()
            on_cpu[name] = time.process_time() - begin_on_cpu
            accelerator.wait_for_everyone()
            seconds[name] = time.perf_counter() - begin
        if number:  # the first warms up
            for name, passed in seconds.items():
                ratios[name].append((passed / seconds["DDP by hand"], on_cpu[name] / on_cpu["DDP by hand"]))
    accelerator.print(f"| {ranks} processes, batches of {batch} | time | CPU time |\n|---|---|---|")
    for name, found in ratios.items():
        columns = [f"{statistics.median(of):.3f} ({min(of):.2f} to {max(of):.2f})" for of in zip(*found, strict=True)]
        accelerator.print(f"| {name} | {' | '.join(columns)} |")


if __name__ == "__main__":
    main()
