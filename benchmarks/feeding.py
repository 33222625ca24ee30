"""Data loading speed relative to torch's own DataLoader, measured side by side in one run.

    python -m benchmarks.feeding [--rounds 7]

Rounds are interleaved and medians of ratios are printed, because machines are shared and noisy. The plain loader takes
part a second time as the control, whose ratio shows how reliable the others are.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from benchmarks.report import footnote, in_rounds
from pytorch_accel_lite import Trainer
from pytorch_accel_lite.data import shard
from pytorch_accel_lite.distributed import Ranks

SAMPLES, FEATURES, BATCH = 60_000, 64, 32


class Rows(Dataset[Any]):
    """A plain map dataset, read one sample at a time."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.data[index]


def exhaust(batches: Iterable[Any]) -> None:
    for _ in batches:
        pass


def ours(dataset: Any, seed: int | None = None) -> Iterable[Any]:
    loader = DataLoader(dataset, BATCH, shuffle=True)
    return shard(loader, Ranks(Accelerator(cpu=True)), torch.device("cpu"), seed, training=True)


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, 10))
    return model, torch.optim.SGD(model.parameters(), lr=1e-3)


def train_by_hand(dataset: Any) -> None:
    model, optimizer = model_and_optimizer()
    loss_func = nn.CrossEntropyLoss()
    for x, y in DataLoader(dataset, BATCH, shuffle=True):
        loss_func(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def train_with_trainer(dataset: Any) -> None:
    model, optimizer = model_and_optimizer()
    Trainer(model, nn.CrossEntropyLoss(), optimizer, callbacks=[]).train(dataset, 1, per_device_batch_size=BATCH)


def measure(contenders: dict[str, Callable[[], None]], rounds: int) -> dict[str, tuple[float, float]]:
    """Return each contender's median time in seconds and the median of its ratios to the first contender."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            start = time.process_time()
            run()
            times[name].append(time.process_time() - start)
    first = next(iter(times.values()))
    ratios = {name: [a / b for a, b in zip(values, first, strict=True)] for name, values in times.items()}
    return {name: (statistics.median(times[name]), statistics.median(ratios[name])) for name in times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    data = TensorDataset(torch.randn(SAMPLES, FEATURES), torch.randint(10, (SAMPLES,)))
    small = Rows(TensorDataset(*(tensor[:6000] for tensor in data.tensors)))
    tables = {
        "feeding a TensorDataset": {
            "DataLoader": lambda: exhaust(DataLoader(data, BATCH, shuffle=True)),
            "DataLoader again (control)": lambda: exhaust(DataLoader(data, BATCH, shuffle=True)),
            "pytorch_accel_lite": lambda: exhaust(ours(data)),
            "pytorch_accel_lite, seed": lambda: exhaust(ours(data, seed=1)),
        },
        "feeding samples one by one": {
            "DataLoader": lambda: exhaust(DataLoader(small, BATCH, shuffle=True)),
            "DataLoader again (control)": lambda: exhaust(DataLoader(small, BATCH, shuffle=True)),
            "pytorch_accel_lite": lambda: exhaust(ours(small)),
            "pytorch_accel_lite, seed": lambda: exhaust(ours(small, seed=1)),
        },
        "training on a TensorDataset": {
            "hand-written loop": lambda: train_by_hand(data),
            "hand-written loop again (control)": lambda: train_by_hand(data),
            "pytorch_accel_lite": lambda: train_with_trainer(data),
        },
    }
    for title, contenders in tables.items():
        print(f"| {title} | ratio | microseconds a sample |\n|---|---|---|")
        count = 6000 if "one by one" in title else SAMPLES
        for name, (seconds, ratio) in measure(contenders, rounds).items():
            print(f"| {name} | {ratio:.2f} | {seconds / count * 1e6:.2f} |")
        print(footnote(in_rounds(rounds), "CPU time, one thread") + "\n")


if __name__ == "__main__":
    main()
