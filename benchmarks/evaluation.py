"""The cost of evaluating and predicting: python -m benchmarks.evaluation [--rounds 15] [--quick].

Like ``benchmarks.paths``, the trainer's evaluation and a hand-written one over the same data take turns in one process;
the table shows lower quartiles of the CPU times of blocks of 20 batches. Then one process and two evaluate and predict
the same data, in a plain loop and with the trainer, in turns; the table shows the least times of the first process. In
the plain loop, two processes halve the data, and gather the outputs of a prediction as one tensor for each.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice, repeat
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.paths import PATHS, Blocks, SetUp, TakesTurns, data_of, taking_turns
from benchmarks.report import footnote, in_rounds
from benchmarks.tasks import Task, make_task
from pytorch_accel_lite import Trainer, get_default_callbacks

BATCHES_IN_BLOCK = SetUp.steps_in_turn


def by_hand(task: Task, batches: Iterable[Any], context: Callable[[], Any] = torch.no_grad) -> Iterator[float]:
    """Sum up losses endlessly, yielding the seconds of CPU time of each block of batches."""
    model, loss_func = task.make_model().eval(), task.loss_func
    endless = chain.from_iterable(repeat(batches))
    total = 0.0
    while True:
        begin = time.thread_time()
        with context():
            for inputs, targets in islice(endless, BATCHES_IN_BLOCK):
                total += loss_func(model(inputs), targets).item() * len(targets)
        yield time.thread_time() - begin


def control(task: Task, context: Callable[[], Any]) -> Blocks:
    batches = task.batches()
    return taking_turns(by_hand(task, batches), by_hand(task, batches, context), task.steps // BATCHES_IN_BLOCK)


def ours(task: Task, setup: SetUp, callbacks: Iterable[Any]) -> Blocks:
    data, options = data_of(task, setup)
    trainer = TakesTurns(task.make_model(), task.loss_func, None, callbacks)
    trainer.is_list = not options
    loader = DataLoader(data, task.batch_size, **options) if options else data
    trainer.take_turns(by_hand(task, loader), BATCHES_IN_BLOCK)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        trainer.evaluate(data, task.batch_size, dataloader_kwargs=options)
    return trainer.times


def paths(task: Task) -> dict[str, Callable[[], Blocks]]:
    quiet = get_default_callbacks(progress_bar=False)
    ready, loader = PATHS["list of batches"], PATHS["DataLoader, `__getitems__`"]
    return {
        "control": lambda: control(task, torch.no_grad),
        "plain loop, inference_mode": lambda: control(task, torch.inference_mode),
        "list of batches": lambda: ours(task, ready, []),
        "list of batches, default callbacks": lambda: ours(task, ready, quiet),
        "DataLoader": lambda: ours(task, loader, []),
        "DataLoader, default callbacks": lambda: ours(task, loader, quiet),
    }


# ---------------------------------------------------------------------------------- one process and two


def on_processes(rounds: int, quick: bool) -> dict[str, list[float]]:
    """Return the least seconds, of CPU time and wall time, of each way to evaluate and predict on these processes."""
    torch.manual_seed(0)
    samples, width = (500, 10) if quick else (20_000, 1000)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, width)).eval()
    data = TensorDataset(torch.randn(samples, 64), torch.randint(width, (samples,)))
    few = TensorDataset(*data[:64])
    loss_func = nn.CrossEntropyLoss()
    trainer = Trainer(model, loss_func, None, callbacks=())
    ranks = trainer.ranks
    share = [tensor[ranks.rank :: ranks.world_size] for tensor in data.tensors]
    batches = list(zip(*(tensor.split(32) for tensor in share), strict=True))
    own_rows = torch.arange(samples)[ranks.rank :: ranks.world_size]

    def evaluate(batches: Iterable[Any] = batches) -> None:
        with torch.no_grad():
            total = sum(loss_func(model(x), y).item() * len(y) for x, y in batches)
        ranks.sum([total, len(share[0])])

    def evaluate_rows() -> None:
        evaluate([tensor[rows] for tensor in data.tensors] for rows in own_rows.split(32))

    def gather(outputs: torch.Tensor) -> Any:
        if ranks.world_size == 1:
            return outputs
        gathered = [torch.empty_like(outputs) for _ in range(ranks.world_size)]
        dist.all_gather(gathered, outputs)
        return torch.stack(gathered, 1).flatten(0, 1)

    def predict() -> Any:
        with torch.no_grad():
            return gather(torch.cat([model(x) for x, _ in batches]))

    def predict_rows() -> Any:
        outputs = torch.empty(len(own_rows), width)
        with torch.no_grad():
            for begin, rows in zip(range(0, samples, 32), own_rows.split(32), strict=False):
                x, _ = [tensor[rows] for tensor in data.tensors]
                outputs[begin : begin + len(rows)] = model(x)
        return gather(outputs)

    ways: dict[str, Callable[[], Any]] = {
        "evaluating in a plain loop": evaluate,
        "evaluating in a plain loop again (control)": evaluate,
        "evaluating in a plain loop, picking rows": evaluate_rows,
        "evaluating": lambda: trainer.evaluate(data, 32),
        "evaluating only 64 samples": lambda: trainer.evaluate(few, 32),
        "predicting in a plain loop": predict,
        "predicting in a plain loop again (control)": predict,
        "predicting in a plain loop, picking rows, into one tensor": predict_rows,
        "predicting": lambda: trainer.predict(data, 32),
        "predicting, `only_first=True`": lambda: trainer.predict(data, 32, only_first=True),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(rounds + 1):  # the first of which warms up
        for name, run in ways.items():
            ranks.barrier()
            cpu, wall = time.process_time(), time.perf_counter()
            run()
            ranks.barrier()
            times[name].append((time.process_time() - cpu, time.perf_counter() - wall))
    return {name: [min(clock) for clock in zip(*taken[1:], strict=True)] for name, taken in times.items()}


def run_job(processes: int, rounds: int, quick: bool) -> dict[str, list[float]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    arguments = ["-m", "benchmarks.evaluation", "--as-rank", "--rounds", str(rounds), *["--quick"] * quick]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=True, env=environment)
    found: dict[str, list[float]] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.evaluation", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.as_rank:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            found = on_processes(arguments.rounds, arguments.quick)
        if os.environ["RANK"] == "0":
            print(json.dumps(found), flush=True)
        return
    task = make_task("loop")
    if arguments.quick:
        few = TensorDataset(*task.dataset[: 80 * task.batch_size])
        task = Task(task.make_model, task.make_optimizer, few, task.batch_size, 80, task.ready)
    blocks: dict[str, Blocks] = {name: ([], []) for name in paths(task)}
    for _ in range(arguments.rounds):
        for name, run in paths(task).items():
            for times, new in zip(blocks[name], run(), strict=True):
                times += new
    print("| evaluating | plain loop, microseconds per batch | added |\n|---|---|---|")
    for name, taken in blocks.items():
        hand, own = (1e6 * statistics.quantiles(times, n=4)[0] / BATCHES_IN_BLOCK for times in taken)
        print(f"| {name} | {hand:.0f} | {own - hand:+.1f} |")
    one, two = (run_job(processes, arguments.rounds, arguments.quick) for processes in (1, 2))
    print("\n| | CPU time, 1 process | each of 2 | ratio | wall time, 1 process | 2 | ratio |")
    print("|---|---|---|---|---|---|---|")
    for name, alone in one.items():
        cells = [
            f"{1e3 * before:.3g} ms | {1e3 * after:.3g} ms | {after / before:.2f}"
            for before, after in zip(alone, two[name], strict=True)
        ]
        print(f"| {name} | {' | '.join(cells)} |")
    print(footnote(in_rounds(arguments.rounds)))


if __name__ == "__main__":
    main()
