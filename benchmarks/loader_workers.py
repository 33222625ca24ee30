"""What worker processes of a loader cost: the time to the first batch of an epoch, and to read all, in turns.

    python -m benchmarks.loader_workers [--workers 2] [--rounds 5] [--megabytes 256]

Each sample is a row of a large NumPy array, which the dataset holds. The standard loader and the trainer's read the
same samples, with workers that are kept between epochs and with new ones; the first row reads the same bytes in a plain
loop, in one process. Memory is what each worker has of its own, as Linux counts it: what it shares with others is left
out.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, Dataset

from benchmarks.report import footnote, in_rounds
from pytorch_accel_lite.data import shard
from pytorch_accel_lite.distributed import Ranks

BATCH = 32
Timed = tuple[float, float, float]  # seconds to the first batch and to the last, MB of a worker's own


class Rows(Dataset[Any]):
    """The rows of a large array."""

    def __init__(self, megabytes: int) -> None:
        self.array = np.ones((megabytes * 16, 1 << 14), dtype=np.float32)

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, index: int) -> Any:
        return torch.from_numpy(self.array[index]), index


def by_hand(data: Rows) -> Iterator[torch.Tensor]:
    """Yield the batches, copied row by row in this process."""
    order = torch.randperm(len(data)).tolist()
    for begin in range(0, len(order), BATCH):
        yield torch.stack([torch.from_numpy(data.array[index]) for index in order[begin : begin + BATCH]])


def ours(loader: DataLoader[Any], seed: int | None = None) -> Iterable[Any]:
    return shard(loader, Ranks(Accelerator(cpu=True)), torch.device("cpu"), seed, training=True)


def own_memory(workers: Iterable[Any]) -> float:
    """Return the largest private memory of some processes, in MB."""
    found = [0.0]
    for worker in workers:
        lines = Path(f"/proc/{worker.pid}/smaps_rollup").read_text().splitlines()
        found.append(sum(int(line.split()[1]) for line in lines if line.startswith("Private")) / 1e3)
    return max(found)


def timed(batches: Iterable[Any]) -> Timed:
    others = active_children()
    begin = time.perf_counter()
    reading = iter(batches)
    next(reading)
    first = time.perf_counter() - begin
    memory = own_memory(worker for worker in active_children() if worker not in others)
    for _ in reading:
        pass
    return first, time.perf_counter() - begin, memory


def contenders(data: Rows, workers: int) -> dict[str, Callable[[], Iterable[Any]]]:
    """Return, by name, what gives the batches of an epoch."""

    def loader(keep: bool, **options: Any) -> DataLoader[Any]:
        return DataLoader(data, BATCH, shuffle=True, num_workers=workers, persistent_workers=keep, **options)

    new, kept = loader(keep=False), loader(keep=True)
    our_new, our_kept, seeded = ours(loader(keep=False)), ours(loader(keep=True)), ours(loader(keep=True), seed=1)
    spawned = ours(loader(keep=True, multiprocessing_context="forkserver"))
    return {
        "plain loop, in this process": lambda: by_hand(data),
        "`DataLoader`, new workers": lambda: new,
        "the same again (control)": lambda: new,
        "trainer, new workers": lambda: our_new,
        "`DataLoader`, kept workers": lambda: kept,
        "trainer, kept workers": lambda: our_kept,
        "trainer, kept workers, seed": lambda: seeded,
        "trainer, kept workers that are no forks": lambda: spawned,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loader_workers", description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=256)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    data = Rows(arguments.megabytes)
    chosen = contenders(data, arguments.workers)
    found: dict[str, list[Timed]] = {name: [] for name in chosen}
    memory: dict[str, float] = {}
    for number in range(arguments.rounds + 1):
        for name, read in chosen.items():
            times = timed(read())
            if number:
                found[name].append((*times[:2], memory[name]))
            else:  # the first epoch of kept workers starts them
                memory[name] = times[2]
    print("| | first batch, ms | all batches, ms | a worker's own memory, MB |\n|---|---|---|---|")
    for name, rounds in found.items():
        first, every, own = (statistics.median(column) for column in zip(*rounds, strict=True))
        print(f"| {name} | {1000 * first:.1f} | {1000 * every:.0f} | {own:.0f} |")
    size = f"{arguments.megabytes} MB in samples of {data.array[0].nbytes >> 10} KB, batches of {BATCH}"
    print(footnote(in_rounds(arguments.rounds), f"Workers: {arguments.workers}", size))


if __name__ == "__main__":
    main()
