"""How cost grows: with the number of callbacks, steps, epochs, samples and processes.

    python -m benchmarks.growth [--only epochs samples] [--steps 100000] [--epochs 1000] [--rounds 1]

What is timed is the CPU time of this process, which other programs disturb least. Steps and epochs are timed in blocks,
of which the lower quartile counts. Memory is that by which the process grows.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, debug_launcher
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, TensorDataset

from benchmarks.order import LARGEST_BY_HAND, by_hand, by_trainer, first_after, measured
from benchmarks.paths import SetUp, TakesTurns, compare
from benchmarks.paths import by_hand as steps_by_hand
from benchmarks.report import footnote, in_rounds
from benchmarks.tasks import Task, make_task
from pytorch_accel_lite import Trainer, TrainerCallback, callbacks, get_default_callbacks

STEPS_IN_BLOCK = SetUp.steps_in_turn
Row = Sequence[object]


class Listening(TrainerCallback):
    """Listens to the start and the end of each step, and does nothing."""

    def on_train_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
        pass

    def on_train_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        pass


class Deaf(TrainerCallback):
    """Listens to the start of a run only."""

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        pass


class Clock(TrainerCallback):
    """Notes the CPU time at the start of each epoch."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
        self.times.append(time.thread_time())


def quartile(seconds: Sequence[float]) -> float:
    """Return the lower quartile, in microseconds."""
    return 1e6 * statistics.quantiles(seconds, n=4)[0]


def powers(first: int, last: int, factor: int = 10) -> list[int]:
    return [n for n in (first * factor**power for power in range(64)) if n <= last]


@contextlib.contextmanager
def in_temporary_folder() -> Iterator[None]:
    """Run a block in a folder of its own, without its output."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def print_table(columns: Iterable[str], rows: Iterable[Row], *details: str) -> None:
    """Print a table, and below it how it was measured, and on what machine."""
    columns = list(columns)
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |", flush=True)
    print(footnote(*details) + "\n")


# ---------------------------------------------------------------------------------------------------- callbacks


def of_callbacks(asked: argparse.Namespace) -> None:
    """Print what callbacks add to a step."""
    task = make_task("loop")
    steps = min(task.steps, asked.steps)
    task = Task(task.make_model, task.make_optimizer, task.dataset, task.batch_size, steps, task.ready)

    def added(kind: type[TrainerCallback], count: int) -> float:
        times: tuple[list[float], list[float]] = [], []
        for _ in range(asked.rounds):
            found = compare(task, SetUp("list"), Path(), [kind() for _ in range(count)])
            for all_times, new in zip(times, found, strict=True):
                all_times += new
        hand, own = (quartile(blocks) / STEPS_IN_BLOCK for blocks in times)
        return own - hand

    def rows() -> Iterator[Row]:
        for count in (0, *powers(1, 64, 4)):
            yield count, f"{added(Listening, count):+.1f}", f"{added(Deaf, count):+.1f}"

    print_table(
        ["callbacks", "that listen to two events of a step, microseconds", "that listen to none"],
        rows(),
        in_rounds(asked.rounds),
    )


# -------------------------------------------------------------------------------------------------------- steps


class Timed(Dataset[Any]):
    """Reads batches of one sample, and notes the CPU time of every twentieth."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.read = 0
        self.times: list[float] = []
        self.batch = torch.ones(1, 4), torch.ones(1, 1)

    def __len__(self) -> int:
        return self.size

    def __getitems__(self, indices: list[int]) -> Any:
        if self.read % STEPS_IN_BLOCK == 0:
            self.times.append(time.thread_time())
        self.read += 1
        return self.batch

    def __getitem__(self, index: int) -> Any:
        raise NotImplementedError


def resident() -> float:
    """Return the resident size of this process in MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def tiny_trainer(*chosen: Any, **kwargs: Any) -> Trainer:
    model = nn.Linear(4, 1)
    return Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=1e-4), callbacks=chosen, **kwargs)


def identity(batch: Any) -> Any:
    return batch


def of_steps(asked: argparse.Namespace) -> None:
    """Print what a step costs in the course of an epoch."""
    data = Timed(asked.steps)
    memory: dict[int, float] = {}

    class Weighs(TrainerCallback):
        def on_train_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
            if trainer.progress.step in marks:
                memory[trainer.progress.step] = resident()

    marks = set(powers(100, asked.steps))
    with in_temporary_folder():
        files = callbacks.MetricsFileCallback("metrics.jsonl"), callbacks.RunLogCallback("log")
        trainer = tiny_trainer(*get_default_callbacks(), *files, Weighs, seed=0)
        kwargs = {"num_workers": 0, "collate_fn": identity}
        trainer.train(data, 1, per_device_batch_size=1, train_dataloader_kwargs=kwargs)
    blocks = [end - begin for begin, end in itertools.pairwise(data.times)]

    def rows() -> Iterator[Row]:
        for steps in sorted(marks):
            part = blocks[steps // 2 // STEPS_IN_BLOCK : steps // STEPS_IN_BLOCK]
            yield f"{steps:,}", f"{quartile(part) / STEPS_IN_BLOCK:.0f}", f"{memory[steps] - memory[100]:+.1f}"

    print_table(["steps so far", "microseconds per step", "memory, MB"], rows())


# ------------------------------------------------------------------------------------------------------- epochs


def set_ups() -> dict[str, Callable[[], list[Any]]]:
    """Return what is measured over epochs, by name."""
    chosen: dict[str, Callable[[], list[Any]]] = {
        "no callbacks": list,
        "default callbacks": lambda: [*get_default_callbacks(progress_bar=False)],
        "a table of epochs": lambda: [callbacks.ProgressTableCallback(show_always=True)],
        "`MetricsFileCallback`, JSON lines": lambda: [callbacks.MetricsFileCallback("metrics.jsonl")],
        "`MetricsFileCallback`, CSV": lambda: [callbacks.MetricsFileCallback("metrics.csv")],
        "`RunLogCallback`": lambda: [callbacks.RunLogCallback("log")],
        "`PlotMetricsCallback`": lambda: [callbacks.PlotMetricsCallback("metrics.png")],
        "`EarlyStoppingCallback`": lambda: [callbacks.EarlyStoppingCallback(early_stopping_patience=10**9)],
    }
    every = [make for name, make in chosen.items() if "default" not in name and "JSON" not in name]
    return chosen | {"all of these": lambda: [callback for make in every for callback in make()]}


def of_epochs(asked: argparse.Namespace) -> None:
    """Print what an epoch of one step and an evaluation costs, by the number of epochs before it."""
    marks = powers(100, asked.epochs)

    def rows() -> Iterator[Row]:
        for name, make in set_ups().items():
            clock = Clock()
            data = TensorDataset(torch.randn(4, 4), torch.randn(4, 1))
            with in_temporary_folder():
                tiny_trainer(*make(), clock).train(data, marks[-1], data, per_device_batch_size=4)
            epochs = [end - begin for begin, end in itertools.pairwise(clock.times)]
            # Means, as some callbacks write only now and then.
            parts = [epochs[mark - mark // 4 : mark] for mark in marks]
            yield name, *(f"{1e6 * statistics.fmean(part):.0f}" for part in parts)

    print_table(["microseconds per epoch", *(f"after {mark:,}" for mark in marks)], rows())


# ------------------------------------------------------------------------------------------------------ samples


def of_samples(asked: argparse.Namespace) -> None:
    """Print the time to the first batch of a shuffled epoch and of a resumed one, and their memory."""

    def rows() -> Iterator[Row]:
        for size in powers(1000, asked.samples):
            cases: list[Callable[[], float]] = [
                partial(by_trainer, size),
                partial(by_trainer, size, seed=0),
                partial(first_after, size, size // 2),
            ]
            if size <= LARGEST_BY_HAND:
                cases.insert(0, partial(by_hand, size))
            found = [f"{1000 * seconds:.3g} ms, {memory:.0f} MB" for seconds, memory in map(measured, cases)]
            yield f"{size:,}", *["-"] * (4 - len(found)), *found

    by_trainer(64)  # imports what runs need
    columns = ["samples", "`DataLoader` by hand", "trainer", "trainer with a seed", "resumed in the middle"]
    print_table(columns, rows())


# ---------------------------------------------------------------------------------------------------- processes


def of_processes(asked: argparse.Namespace) -> None:
    """Print what a step costs on several processes of this machine: by hand on ready batches, and with the trainer."""

    def rows() -> Iterator[Row]:
        for processes in powers(1, 8, 2):
            queue = get_context("fork").SimpleQueue()
            with in_temporary_folder():
                debug_launcher(_steps_in_turns, (asked.steps, queue.put), processes)
            hand, own = queue.get()
            yield processes, f"{hand:.0f}", f"{own - hand:+.0f}", f"{own / hand:.2f}"

    columns = ["processes", "DDP by hand, microseconds per step", "added by the trainer", "ratio"]
    print_table(columns, rows())


def _steps_in_turns(steps: int, report: Callable[[tuple[float, float]], None]) -> None:
    """Report the quartiles of the wall times of steps by hand and of the trainer's, on the first process."""
    torch.set_num_threads(1)
    for state in (AcceleratorState, GradientState, PartialState):  # of the process that was forked
        state._reset_state()
    task = make_task("loop")
    accelerator = Accelerator(cpu=True)
    ranks = accelerator.num_processes
    few = TensorDataset(*task.dataset[: min(steps * ranks, task.steps) * task.batch_size])
    task = Task(task.make_model, task.make_optimizer, few, task.batch_size, len(few) // task.batch_size, task.ready)
    wrap = DistributedDataParallel if ranks > 1 else (lambda model: model)
    model = task.make_model()
    trainer = TakesTurns(model, task.loss_func, task.make_optimizer(model), [], seed=0)
    trainer.clock = time.perf_counter
    by_loop = steps_by_hand(task, SetUp("list"), Path(), task.batches(), time.perf_counter, wrap)
    trainer.take_turns(by_loop, STEPS_IN_BLOCK)
    trainer.train(few, 2, per_device_batch_size=task.batch_size)
    if accelerator.is_main_process:
        one, other = (quartile(times) / STEPS_IN_BLOCK for times in trainer.times)
        report((one, other))


TABLES = {
    "callbacks": of_callbacks,
    "steps": of_steps,
    "epochs": of_epochs,
    "samples": of_samples,
    "processes": of_processes,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=TABLES, default=list(TABLES))
    parser.add_argument("--steps", type=int, default=10**6, help="largest number of steps")
    parser.add_argument("--epochs", type=int, default=10**4, help="largest number of epochs")
    parser.add_argument("--samples", type=int, default=10**8, help="largest number of samples")
    parser.add_argument("--rounds", type=int, default=5, help="repetitions where callbacks are compared")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.only:
        TABLES[name](arguments)


if __name__ == "__main__":
    main()
