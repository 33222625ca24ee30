"""The overhead of a step for common set-ups: python -m benchmarks.paths [--rounds 15] [--only seed].

Results are microseconds per step in addition to the hand-written loop on the same data, alternating in one process;
medians over all rounds. The control compares that loop with itself, and shows how reliable the other figures are.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from benchmarks.tasks import Task, make_task
from pytorch_accel_lite import Trainer, get_default_callbacks
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback
from pytorch_accel_lite.data import OwnShard

QUIET = get_default_callbacks(progress_bar=False)


class ReadsBatches(Dataset[Any]):
    """A dataset that reads a batch of samples at once."""

    def __init__(self, task: Task) -> None:
        self.x, self.y = task.dataset.tensors  # type: ignore[attr-defined]

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index]

    def __getitems__(self, indices: list[int]) -> Any:
        return self.x[indices], self.y[indices]


def collated(batch: Any) -> Any:
    return batch


class Timed(Trainer):
    """A trainer that measures its last epoch."""

    def train_epoch_start(self) -> None:
        super().train_epoch_start()
        self.begin = time.perf_counter()

    def train_epoch_end(self) -> None:
        self.seconds = time.perf_counter() - self.begin


class ReadyBatches(Timed):
    def create_train_dataloader(self, batch_size: int, train_dl_kwargs: Any = None) -> Any:
        return OwnShard(self.train_dataset)


def by_hand(task: Task, batches: Iterable[Any]) -> float:
    model = task.make_model()
    optimizer, loss_func = task.make_optimizer(model), task.loss_func
    model.train()
    begin = time.perf_counter()
    for inputs, targets in batches:
        loss_func(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return time.perf_counter() - begin


def ours(task: Task, trainer_class: type[Timed], data: Any, callbacks: Iterable[Any], **kwargs: Any) -> float:
    model = task.make_model()
    trainer = trainer_class(model, task.loss_func, task.make_optimizer(model), callbacks, **kwargs)
    reads = {"num_workers": 0, "collate_fn": collated}
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        trainer.train(data, 1, per_device_batch_size=task.batch_size, train_dataloader_kwargs=reads)
    return trainer.seconds


def paths(task: Task, folder: str) -> dict[str, tuple[Callable[[], float], Callable[[], float]]]:
    """Return, by name, the hand-written loop and the trainer to compare with it."""
    ready, data = task.batches(), ReadsBatches(task)

    def hand() -> float:
        return by_hand(task, ready)

    def hand_loader() -> float:
        return by_hand(task, DataLoader(data, task.batch_size, shuffle=True, collate_fn=collated))

    def states() -> list[Any]:
        return [SaveTrainingStateCallback(folder, save_at_end=False)]

    def step(trainer_class: type[Timed], source: Any, callbacks: Callable[[], Any], **kwargs: Any) -> Any:
        return lambda: ours(task, trainer_class, source, callbacks(), **kwargs)

    return {
        "control": (hand, hand),
        "list of batches": (hand, step(ReadyBatches, ready, list)),
        "list of batches, default callbacks": (hand, step(ReadyBatches, ready, lambda: QUIET)),
        "DataLoader": (hand_loader, step(Timed, data, list)),
        "DataLoader, default callbacks": (hand_loader, step(Timed, data, lambda: QUIET)),
        "DataLoader, seed": (hand_loader, step(Timed, data, list, seed=1)),
        "DataLoader, training states": (hand_loader, step(Timed, data, states)),
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
        few = TensorDataset(*task.dataset[: 20 * task.batch_size])
        task = Task(task.make_model, task.make_optimizer, few, task.batch_size, 20, task.ready)
    with tempfile.TemporaryDirectory() as folder:
        chosen = {name: pair for name, pair in paths(task, folder).items() if arguments.only in name}
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in chosen}
        for _ in range(arguments.rounds):
            for name, (hand, own) in chosen.items():
                found[name].append((hand(), own()))
    print("| path | by hand, microseconds per step | added by the trainer |\n|---|---|---|")
    for name, times in found.items():
        steps = (len(task.dataset) if "Loader" in name else task.batch_size * task.steps) / task.batch_size  # type: ignore[arg-type]
        by_hand_, over = (statistics.median(column) for column in zip(*((h, o - h) for h, o in times), strict=True))
        print(f"| {name} | {1e6 * by_hand_ / steps:.0f} | {1e6 * over / steps:+.1f} |")


if __name__ == "__main__":
    main()
