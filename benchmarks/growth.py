"""How cost grows: with the number of callbacks, steps, epochs, samples and processes.

    python -m benchmarks.growth [--only epochs samples] [--steps 100000] [--epochs 1000] [--rounds 1]

What is timed is the CPU time of this process, which other programs disturb least; several processes wait for one
another, so their wall time is. Steps and epochs are timed in blocks, of which the lower quartile counts. Memory is that
by which the process grows.
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
from dataclasses import replace
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
from benchmarks.paths import Blocks, SetUp, TakesTurns, compare, taking_turns
from benchmarks.paths import by_hand as steps_by_hand
from benchmarks.report import footnote, in_rounds
from benchmarks.tasks import Task, make_task
from pytorch_accel_lite import Trainer, TrainerCallback, callbacks, get_default_callbacks

STEPS_IN_BLOCK = SetUp.steps_in_turn
STEPS_OF_RANKS = 400  # in a round; with 8 processes, each takes as long as 100 of one
PATIENCE = 10**9  # epochs that EarlyStoppingCallback waits: it never stops
Row = Sequence[object]
Turns = dict[str, tuple[float, float]]  # by name: microseconds of a step of the plain loop, and of the other


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


class StepClock(TrainerCallback):
    """Notes the CPU time after the first steps and after each block of steps, and memory after some steps."""

    def __init__(self, weighed: Iterable[int]) -> None:
        self.times: dict[int, float] = {}
        self.memory = dict.fromkeys(weighed, 0.0)

    def on_train_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
        self.times[0] = time.thread_time()

    def on_train_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        step = trainer.progress.step
        if step < STEPS_IN_BLOCK or step % STEPS_IN_BLOCK == 0:
            self.times[step] = time.thread_time()
        if step in self.memory:
            self.memory[step] = resident()

    def quartile(self, first: int, last: int) -> float:
        """Return the lower quartile of the microseconds of a step, from one number of steps to another."""
        points = [step for step in self.times if first <= step <= last]
        return quartile([(self.times[b] - self.times[a]) / (b - a) for a, b in itertools.pairwise(points)])


def quartile(seconds: Sequence[float]) -> float:
    """Return the lower quartile, in microseconds."""
    return 1e6 * (statistics.quantiles(seconds, n=4)[0] if len(seconds) > 1 else seconds[0])


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

    def added(run: Callable[[], Blocks]) -> float:
        times: Blocks = [], []
        for _ in range(asked.rounds):
            for all_times, new in zip(times, run(), strict=True):
                all_times += new
        hand, own = (quartile(blocks) / STEPS_IN_BLOCK for blocks in times)
        return own - hand

    def with_callbacks(kind: type[TrainerCallback], count: int) -> float:
        return added(lambda: compare(task, SetUp("list"), Path(), [kind() for _ in range(count)]))

    def control() -> Blocks:
        one, other = (steps_by_hand(task, SetUp("list"), Path()) for _ in range(2))
        return taking_turns(one, other, steps // STEPS_IN_BLOCK)

    counts = [0, *powers(1, 64, 4)]
    columns = ["callbacks", "that listen to two events of a step, microseconds", "that listen to none"]
    found = {kind: {count: with_callbacks(kind, count) for count in counts} for kind in (Listening, Deaf)}
    each = {kind: statistics.linear_regression(list(by_count), list(by_count.values())).slope
            for kind, by_count in found.items()}  # fmt: skip
    rows: list[Row] = [("the plain loop again (control)", *[f"{added(control):+.1f}" for _ in found])]
    rows += [(count, *(f"{by_count[count]:+.1f}" for by_count in found.values())) for count in counts]
    rows.append(("each, by least squares", *(f"{slope:+.2f}" for slope in each.values())))
    print_table(columns, rows, in_rounds(asked.rounds), "What is added to a step of the plain loop")


# -------------------------------------------------------------------------------------------------------- steps


class Repeated(Dataset[Any]):
    """Reads batches of one sample."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.batch = torch.ones(1, 4), torch.ones(1, 1)

    def __len__(self) -> int:
        return self.size

    def __getitems__(self, indices: list[int]) -> Any:
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
    marks = powers(1, asked.steps)
    clock = StepClock(marks)
    with in_temporary_folder():
        files = callbacks.MetricsFileCallback("metrics.jsonl"), callbacks.RunLogCallback("log")
        trainer = tiny_trainer(*get_default_callbacks(), *files, clock, seed=0)
        kwargs = {"num_workers": 0, "collate_fn": identity}
        trainer.train(Repeated(asked.steps), 1, per_device_batch_size=1, train_dataloader_kwargs=kwargs)

    def rows() -> Iterator[Row]:
        for steps in marks:
            memory = clock.memory[steps] - clock.memory[marks[0]]
            yield f"{steps:,}", f"{clock.quartile(steps // 2, steps):.0f}", f"{memory:+.1f}"

    details = (
        "Batches of one sample, with the default callbacks, a bar, a metrics file, a log of the run and a seed",
        "The lower quartile of the second half of the steps so far; the first step includes what a run does once",
    )
    print_table(["steps so far", "microseconds per step", "memory, MB"], rows(), *details)


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
        "`EarlyStoppingCallback`": lambda: [callbacks.EarlyStoppingCallback(early_stopping_patience=PATIENCE)],
    }
    every = [make for name, make in chosen.items() if "default" not in name and "JSON" not in name]
    states = partial(callbacks.SaveTrainingStateCallback, "states", save_every_n_epochs=1, max_checkpoints=1)
    return chosen | {
        "all of these": lambda: [callback for make in every for callback in make()],
        "`SaveTrainingStateCallback`": lambda: [states()],
    }


def of_epochs(asked: argparse.Namespace) -> None:
    """Print what an epoch of one step and an evaluation costs, by the number of epochs before it."""
    marks = powers(1, asked.epochs)

    def rows() -> Iterator[Row]:
        for name, make in set_ups().items():
            clock = Clock()
            data = TensorDataset(torch.randn(4, 4), torch.randn(4, 1))
            with in_temporary_folder():
                # One more, at whose start the last one is over.
                tiny_trainer(*make(), clock).train(data, marks[-1] + 1, data, per_device_batch_size=4)
            epochs = [end - begin for begin, end in itertools.pairwise(clock.times)]
            # Means, as some callbacks write only now and then.
            parts = [epochs[mark - max(mark // 4, 1) : mark] for mark in marks]
            yield name, *(f"{1e6 * statistics.fmean(part):.0f}" for part in parts)

    details = (
        "An epoch of one step and an evaluation of one batch; the mean of the last quarter of the epochs so far",
        "One training state is kept, and written after each epoch; early stopping waits forever; a page or a picture "
        "takes at most a fiftieth of the time; all else is as by default",
        '"All of these" has one of the two metrics files, and no default callbacks',
    )
    print_table(["microseconds per epoch", *(f"after {mark:,}" for mark in marks)], rows(), *details)


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
    columns = ["samples", "plain `DataLoader` loop", "trainer", "trainer with a seed", "resumed in the middle"]
    details = "CPU time up to the first batch, and by how much the process grows until then; batches of 32"
    print_table(columns, rows(), details)


# ---------------------------------------------------------------------------------------------------- processes


def of_processes(asked: argparse.Namespace) -> None:
    """Print what a step on ready batches costs on several processes of this machine: a plain loop and the trainer."""

    steps = min(asked.steps, STEPS_OF_RANKS)

    def turns_of(processes: int) -> Iterator[Turns]:
        for _ in range(asked.rounds):
            queue = get_context("fork").SimpleQueue()
            with in_temporary_folder():
                debug_launcher(_steps_in_turns, (steps, queue.put), processes)
            yield queue.get()

    def rows() -> Iterator[Row]:
        for processes in powers(1, asked.processes, 2):
            found = list(turns_of(processes))
            for name in found[0]:
                pairs = [turns[name] for turns in found]
                hand, more = (statistics.median(values) for values in zip(*((a, b - a) for a, b in pairs), strict=True))
                ratios = [own / before for before, own in pairs]
                spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
                yield processes, name, f"{hand:.0f}", f"{more:+.0f}", spread

    columns = ["processes", "", "plain DDP loop, microseconds per step", "added", "ratio"]
    details = (
        "Medians of the rounds, with the least and the largest ratio",
        f"The lower quartile of the wall times of turns of {STEPS_IN_BLOCK} steps, {steps} steps in a round, on the "
        "same list of ready batches without a seed",
        f"{os.cpu_count()} cores; more processes share them",
    )
    print_table(columns, rows(), in_rounds(asked.rounds), *details)


def _steps_in_turns(steps: int, report: Callable[[Turns], None]) -> None:
    """Report the wall times of steps of the plain loop and of others, on the first process, by the others' names."""
    torch.set_num_threads(1)
    for state in (AcceleratorState, GradientState, PartialState):  # of the process that was forked
        state._reset_state()
    accelerator = Accelerator(cpu=True)
    task = replace(make_task("loop"), steps=steps)
    batches = task.batches()
    wrap = DistributedDataParallel if accelerator.num_processes > 1 else (lambda model: model)

    def by_hand() -> Iterator[float]:
        return steps_by_hand(task, SetUp("list"), Path(), batches, time.perf_counter, wrap)

    model = task.make_model()
    trainer = TakesTurns(model, task.loss_func, task.make_optimizer(model), [])
    trainer.is_list, trainer.clock = True, time.perf_counter
    trainer.take_turns(by_hand(), STEPS_IN_BLOCK)
    trainer.train(batches, 1, per_device_batch_size=task.batch_size)
    found = {
        "plain loop again (control)": taking_turns(by_hand(), by_hand(), steps // STEPS_IN_BLOCK),
        "trainer": trainer.times,
    }
    if accelerator.is_main_process:
        means = {name: [quartile(times) / STEPS_IN_BLOCK for times in blocks] for name, blocks in found.items()}
        report({name: (hand, other) for name, (hand, other) in means.items()})


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
    parser.add_argument("--processes", type=int, default=8, help="largest number of processes")
    parser.add_argument("--rounds", type=int, default=5, help="repetitions where callbacks or processes are compared")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.only:
        TABLES[name](arguments)


if __name__ == "__main__":
    main()
