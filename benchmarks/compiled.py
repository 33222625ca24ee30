"""What compiling the step brings: python -m benchmarks.compiled [--workloads loop convnet] [--seconds 20].

Each way of training takes turns with the hand-written, uncompiled loop over the same batches, in one process with one
thread. The figures are the lower quartiles of the CPU times of its turns, in microseconds per step, as in
``benchmarks.paths``; the last column tells how many turns there were. The time to start is the wall time of the first
two steps over that of the hand-written loop: compilation, without torch's caches.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import TorchDynamoPlugin

from benchmarks.report import footnote
from benchmarks.tasks import Task, make_task, text_task
from pytorch_accel_lite import Trainer, get_default_callbacks
from pytorch_accel_lite.data import OwnShard

STEPS = {"loop": 50, "convnet": 10, "transformer": 1, "blocks": 1}  # in a turn
TITLES = {  # not those of benchmarks.__main__: the transformer is a smaller one, which is compiled sooner
    "loop": "The MLP, SGD",
    "convnet": "The convolutional network, SGD",
    "transformer": "A transformer of one block, AdamW",
    "blocks": "A transformer of 12 blocks, AdamW",
}
Step = Callable[[Any], object]


class Measurement:
    """Seconds of CPU time of blocks of steps, and of the blocks of the hand-written loop before each."""

    def __init__(self, task: Task, steps: int, seconds: float) -> None:
        self.by_hand: list[float] = []
        self.own: list[float] = []
        self._reference = hand_written(task)
        self._batches = cycle(task.batches()[:64])
        self._steps = steps
        self._seconds = seconds
        begin = time.perf_counter()
        for _ in range(2):
            self._reference(next(self._batches))
        self.start = begin - time.perf_counter()  # to be added to the time of the other way's

    def batches(self) -> Iterator[Any]:
        """Yield batches, and time what is done with them."""
        begin = time.perf_counter()
        yield next(self._batches)
        yield next(self._batches)
        self.start += time.perf_counter() - begin
        for _ in range(2):
            yield next(self._batches)
        while time.perf_counter() < begin + self._seconds or len(self.own) < 3:
            self.by_hand.append(self._time(lambda batch: self._reference(batch)))
            now = time.thread_time()
            for _ in range(self._steps):
                yield next(self._batches)
            self.own.append(time.thread_time() - now)

    def _time(self, step: Step) -> float:
        begin = time.thread_time()
        for _ in range(self._steps):
            step(next(self._batches))
        return time.thread_time() - begin

    def row(self, name: str) -> str:
        hand, own = (1e6 * statistics.quantiles(times, n=4)[0] / self._steps for times in (self.by_hand, self.own))
        return f"| {name} | {hand:,.0f} | {own:,.0f} | {own / hand:.2f} | {self.start:.1f} | {len(self.own)} |"


def make(task: Task, fused: bool) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = task.make_model()
    usual = task.make_optimizer(model)
    optimizer = type(usual)(model.parameters(), lr=usual.defaults["lr"], fused=True) if fused else usual
    model.train()
    return model, optimizer


def hand_written(task: Task, compiled: bool = False, fused: bool = False, compiled_update: bool = False) -> Step:
    """Return a step of a hand-written loop."""
    model, optimizer = make(task, fused)
    loss_func = task.loss_func

    def compute(inputs: Any, targets: Any) -> torch.Tensor:
        return loss_func(model(inputs), targets)

    loss_of = torch.compile(compute) if compiled else compute
    update = torch.compile(optimizer.step) if compiled_update else optimizer.step

    def step(batch: Any) -> None:
        loss_of(*batch).backward()
        update()
        optimizer.zero_grad()

    return step


def of_trainer(
    task: Task, measurement: Measurement, fused: bool = False, regional: bool = False, **kwargs: Any
) -> None:
    """Train with the default callbacks but the bar.

    Args:
        regional: let Accelerate compile the blocks that the model repeats
    """
    model, optimizer = make(task, fused)
    AcceleratorState._reset_state(reset_partial_state=True)  # it keeps what is compiled
    if regional:
        plugin = TorchDynamoPlugin(backend="inductor", use_regional_compilation=True)
        kwargs["accelerator"] = Accelerator(cpu=True, dynamo_plugin=plugin)
    callbacks = get_default_callbacks(progress_bar=False)
    trainer = Trainer(model, task.loss_func, optimizer, callbacks, **kwargs)
    trainer.create_train_dataloader = lambda *_: OwnShard(measurement.batches())  # type: ignore[method-assign]
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        trainer.train([0] * task.batch_size, 1, per_device_batch_size=task.batch_size)


def ways() -> dict[str, Callable[[Task, Measurement], None]]:
    """Return ways of training by name."""

    def by_hand(**options: bool) -> Callable[[Task, Measurement], None]:
        def run(task: Task, measurement: Measurement) -> None:
            step: Step | None = None
            for batch in measurement.batches():
                step = step or hand_written(task, **options)
                step(batch)

        return run

    def ours(**options: Any) -> Callable[[Task, Measurement], None]:
        return lambda task, measurement: of_trainer(task, measurement, **options)

    return {
        "plain loop again (control)": by_hand(),
        "plain loop, fused optimizer": by_hand(fused=True),
        "plain loop, forward pass and loss compiled": by_hand(compiled=True),
        "the same, and the optimizer's step": by_hand(compiled=True, compiled_update=True),
        "plain loop, compiled, fused optimizer": by_hand(compiled=True, fused=True),
        "trainer": ours(),
        "trainer, `compile_step=True`": ours(compile_step=True),
        "trainer, `compile_step=True`, fused optimizer": ours(compile_step=True, fused=True),
        "trainer, `compile_model=True`": ours(compile_model=True),
        'trainer, `compile_model="blocks"`': ours(compile_model="blocks"),
        "trainer, Accelerate's regional compilation": ours(regional=True),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compiled", description=__doc__)
    parser.add_argument("--workloads", nargs="+", choices=[*TITLES], default=[*TITLES])
    parser.add_argument("--seconds", type=float, default=20, help="for each way")
    parser.add_argument("--only", default="", help="only ways whose name contains this")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", tempfile.mkdtemp())  # compiled C++ is found there nevertheless
    warnings.filterwarnings("ignore", module="torch")
    for workload in arguments.workloads:
        task = text_task(8, steps=4, depth=12) if workload == "blocks" else make_task(workload, quick=True)
        steps = 1 if arguments.quick else STEPS[workload]
        print(f"### {TITLES[workload]}\n")
        print("| | plain loop, µs | this, µs | ratio | to start, s | turns |\n|---|---|---|---|---|---|", flush=True)
        for name, run in ways().items():
            if arguments.only in name:
                torch.compiler.reset()
                measurement = Measurement(task, steps, arguments.seconds)
                run(task, measurement)
                print(measurement.row(name), flush=True)
        turn = f"turns of {steps} step{'s' * (steps > 1)}"
        print(footnote(f"{arguments.seconds:g} seconds for each row in {turn}, one thread") + "\n")


if __name__ == "__main__":
    main()
