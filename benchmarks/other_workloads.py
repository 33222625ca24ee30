"""Workloads other than a plain training loop: evaluation, two processes, start-up, memory, a GPU."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks import gpu
from benchmarks.feeding import Rows
from benchmarks.report import Rounds
from benchmarks.tasks import Task, make_task

Run = Callable[..., dict[str, float] | None]
Measures = dict[str, Callable[[], dict[str, float] | None]]
IN_TURNS = "plain loop, in turns"  # the reference of contenders that are measured with their own


@dataclass(frozen=True)
class Other:
    """A workload: its title, the reference of its ratios, and its contenders, each measured by one call."""

    title: str
    reference: str
    measures: Callable[[bool, Run], Measures]
    unit: str = ""  # for figures that are not ratios
    make_table: Callable[[Rounds], str] | None = None  # for those that have more columns


def timed(action: Callable[[], Any]) -> dict[str, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    action()
    return {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}


def in_process(kind: str, names: list[str], quick: bool, run: Run) -> Measures:
    """Return calls that run each contender of this module in its own process."""
    return {
        name: partial(run, "benchmarks.other_workloads", kind, name, "quick" if quick else "full") for name in names
    }


# ------------------------------------------------------------------------------------------- evaluation


def evaluation_by_hand(task: Task) -> Callable[[], Any]:
    model, loss_func = task.make_model().eval(), task.loss_func
    loader = DataLoader(task.dataset, task.batch_size)

    def evaluate() -> float:
        total = torch.zeros((), dtype=torch.float64)
        with torch.no_grad():
            for inputs, targets in loader:
                total += loss_func(model(inputs), targets) * len(targets)
        return float(total) / len(task.dataset)  # type: ignore[arg-type]

    return evaluate


def evaluation_ours(task: Task) -> Callable[[], Any]:
    from pytorch_accel_lite import Trainer, get_default_callbacks

    trainer = Trainer(task.make_model(), task.loss_func, None, get_default_callbacks(progress_bar=False))
    kwargs = {"num_workers": 0}
    return lambda: trainer.evaluate(task.dataset, task.batch_size, dataloader_kwargs=kwargs)


def evaluation_ancestor(task: Task) -> Callable[[], Any]:
    from pytorch_accelerated import Trainer
    from pytorch_accelerated.callbacks import get_default_callbacks

    model = task.make_model()
    trainer = Trainer(model, task.loss_func, None, get_default_callbacks(progress_bar=False))
    kwargs = {"num_workers": 0, "pin_memory": False}
    return lambda: trainer.evaluate(task.dataset, task.batch_size, dataloader_kwargs=kwargs)


EVALUATIONS = {
    "plain loop": evaluation_by_hand,
    "plain loop again (control)": evaluation_by_hand,
    "ours": evaluation_ours,
    "pytorch-accelerated": evaluation_ancestor,
}


# --------------------------------------------------------------------------------------------- settings


def setting(name: str, quick: bool) -> dict[str, float]:
    """Train the MLP with AdamW from a TensorDataset, with one setting changed."""
    from pytorch_accel_lite import Trainer, get_default_callbacks

    task = make_task("tensors", quick)
    model = task.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True if name == "fused AdamW" else None)
    dataset = Rows(task.dataset) if "sample by sample" in name else task.dataset
    batch_size = task.batch_size * (4 if name == "batches of 128" else 1)
    workers = {"num_workers": 2 if "2 workers" in name else 0}
    trainer = Trainer(model, task.loss_func, optimizer, get_default_callbacks(progress_bar=False))
    return timed(lambda: trainer.train(dataset, 1, None, batch_size, train_dataloader_kwargs=workers))


SETTINGS = ["as it is", "again (control)", "fused AdamW", "batches of 128", "sample by sample",
            "sample by sample, 2 workers"]  # fmt: skip


# ---------------------------------------------------------------------------------------- two processes


def two_processes(name: str, quick: bool, run: Run) -> dict[str, float] | None:
    """Train on 2 processes and return the time of the first."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    arguments = ["benchmarks.other_workloads", "rank", name, "quick" if quick else "full"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=True, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    result: dict[str, float] = json.loads(lines[-1])
    return result


def ddp_by_hand(task: Task) -> Callable[[], Any]:
    torch.distributed.init_process_group("gloo")
    model, loss_func = DistributedDataParallel(task.make_model()), task.loss_func
    optimizer = task.make_optimizer(model)
    loader = DataLoader(task.dataset, task.batch_size, sampler=DistributedSampler(task.dataset))

    def train() -> None:
        for inputs, targets in loader:
            loss_func(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()

    return train


def ddp_ours(task: Task) -> Callable[[], Any]:
    from pytorch_accel_lite import Trainer, get_default_callbacks

    model = task.make_model()
    trainer = Trainer(model, task.loss_func, task.make_optimizer(model), get_default_callbacks(progress_bar=False))
    return lambda: trainer.train(task.dataset, 1, None, task.batch_size, train_dataloader_kwargs={"num_workers": 0})


def ddp_ancestor(task: Task) -> Callable[[], Any]:
    from pytorch_accelerated import Trainer
    from pytorch_accelerated.callbacks import get_default_callbacks

    model = task.make_model()
    trainer = Trainer(model, task.loss_func, task.make_optimizer(model), get_default_callbacks(progress_bar=False))
    kwargs = {"num_workers": 0, "pin_memory": False}
    return lambda: trainer.train(task.dataset, 1, None, task.batch_size, train_dataloader_kwargs=kwargs)


DDP = {
    "plain DDP loop": ddp_by_hand,
    "plain DDP loop again (control)": ddp_by_hand,
    "ours": ddp_ours,
    "pytorch-accelerated": ddp_ancestor,
}


# --------------------------------------------------------------------------------------------- start-up

IMPORTS = {
    "accelerate": "import accelerate",
    "accelerate again (control)": "import accelerate",
    "ours": "import pytorch_accel_lite",
    "torch": "import torch",
    "pytorch-accelerated": "import pytorch_accelerated.trainer",
    "Lightning": "import lightning",
    "transformers.Trainer": "from transformers import Trainer",
    "Ignite": "import ignite.engine",
    "fastai": "import fastai.learner",
    "skorch": "import skorch",
    "Keras": "import os; os.environ['KERAS_BACKEND'] = 'torch'; import keras",
}


def time_import(statement: str) -> dict[str, float] | None:
    code = (
        f"import time; w, c = time.perf_counter(), time.process_time()\n{statement}\n"
        "print(time.process_time() - c, time.perf_counter() - w)"
    )
    # With bytecode files, as an installed package has them; a checkout writes them on the first run.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment
        )
        if done.returncode:
            return None
    cpu, wall = map(float, done.stdout.split()[-2:])
    return {"cpu": cpu, "wall": wall}


# ----------------------------------------------------------------------------------------------- memory


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def memory_growth(name: str, quick: bool) -> dict[str, float]:
    """Return the growth of resident memory in MiB over the last nine tenths of 100,000 updates."""
    steps, task = 1000 if quick else 100_000, make_task("loop", True)
    batches, model = task.batches(), task.make_model()
    optimizer, loss_func = task.make_optimizer(model), task.loss_func
    marks: list[int] = []

    def endless() -> Any:
        for step in range(steps):
            if step in (steps // 10, steps - 1):
                marks.append(resident_bytes())
            yield batches[step % len(batches)]

    if name == "ours":
        from pytorch_accel_lite import Trainer, get_default_callbacks

        class Fed(Trainer):
            def create_train_dataloader(self, batch_size: int, train_dl_kwargs: Any = None) -> Any:
                return endless()

        trainer = Fed(model, loss_func, optimizer, get_default_callbacks(progress_bar=False))
        trainer.train(task.dataset, 1)
    else:
        for inputs, targets in endless():
            loss_func(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    return {"growth": (marks[1] - marks[0]) / 2**20}


# -------------------------------------------------------------------------------------------- callbacks


def watching(folder: Path) -> dict[str, list[Any]]:
    """Return the monitoring callbacks, each alone and all together."""
    from pytorch_accel_lite import callbacks as c

    each: list[Any] = [
        *c.get_default_callbacks(progress_bar=False),
        c.ProgressBarCallback(show_always=True),
        c.LearningRateMonitorCallback(),
        c.GradientNormCallback(),
        c.ThroughputCallback(),
        c.DeviceMemoryCallback(),
        c.MetricsFileCallback(folder / "metrics.csv", every_n_updates=50),
        c.TrackerCallback("tensorboard", project_dir=folder, every_n_updates=50),
    ]
    defaults, others = (
        each[: len(c.get_default_callbacks(progress_bar=False))],
        each[len(c.get_default_callbacks()) - 1 :],
    )
    alone = {type(callback).__name__: [callback] for callback in others}
    return {"the default ones, no bar": defaults, **alone, "all together": each}


WATCHING = ["the default ones, no bar", "ProgressBarCallback", "LearningRateMonitorCallback", "GradientNormCallback",
            "ThroughputCallback", "DeviceMemoryCallback", "MetricsFileCallback",
            "TrackerCallback", "all together"]  # fmt: skip


def time_in_callbacks(name: str, quick: bool) -> dict[str, float]:
    """Return the time of callbacks in the steps of a small convnet, as measured by ``TimingCallback`` in that run."""
    from benchmarks.contenders import ours
    from pytorch_accel_lite.callbacks import TimingCallback

    task = make_task("convnet", quick)
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):
        timing = TimingCallback(show=False)
        train = ours(task, [*watching(Path(folder))[name], timing])
        train()  # includes imports, which a step does not
        # A collection of what they brought takes 150 ms, and lands in whichever call is running.
        gc.collect()
        gc.freeze()
        train()
        gc.unfreeze()
    taken = sum(seconds for part, seconds in timing.totals.items() if part.endswith("Callback"))
    taken -= timing.totals["TimingCallback"]
    return {"microseconds per step": 1e6 * taken / task.steps, "percent of the run": 100 * taken / timing.totals["run"]}


# -------------------------------------------------------------------------------------------------- GPU


def on_gpu(kind: str, quick: bool, run: Run) -> Measures:
    """Return calls that measure each row in its own process, in turns with a plain loop."""

    def measure(row: str) -> dict[str, float] | None:
        try:
            return run("benchmarks.gpu", kind, row, "quick" if quick else "full")
        except RuntimeError as error:  # the other rows have taken long, and say something all the same
            print(error, file=sys.stderr)
            return None

    return {row: partial(measure, row) for row in gpu.ROWS}


OTHERS = {
    "evaluation": Other(
        "Evaluating the MLP on a TensorDataset",
        "plain loop",
        lambda quick, run: in_process("evaluation", list(EVALUATIONS), quick, run),
    ),
    "settings": Other(
        "The MLP with AdamW on a TensorDataset, one setting changed at a time",
        "as it is",
        lambda quick, run: in_process("setting", SETTINGS, quick, run),
    ),
    "processes": Other(
        "The MLP on 2 processes, relative to hand-written DistributedDataParallel",
        "plain DDP loop",
        lambda quick, run: {name: partial(two_processes, name, quick, run) for name in DDP},
    ),
    "startup": Other(
        "Import time",
        "accelerate",
        lambda quick, run: {name: partial(time_import, statement) for name, statement in IMPORTS.items()},
    ),
    "memory": Other(
        "Memory growth from update 10,000 to update 100,000 of the MLP",
        "plain loop",
        lambda quick, run: in_process("memory", ["plain loop", "ours"], quick, run),
        unit="MiB",
    ),
    "callbacks": Other(
        "Cost of monitoring callbacks in a step of the small convolutional network",
        "all together",
        lambda quick, run: in_process("callbacks", WATCHING, quick, run),
        unit="medians",
    ),
    "gpu_resnet": Other(
        "ResNet-50 on a GPU: batches of 64 images of 224 x 224, AdamW",
        IN_TURNS,
        lambda quick, run: on_gpu("gpu_resnet", quick, run),
        make_table=gpu.table,
    ),
    "gpu_transformer": Other(
        "A transformer of 10 million parameters on a GPU: batches of 64 x 64 bytes of text, AdamW",
        IN_TURNS,
        lambda quick, run: on_gpu("gpu_transformer", quick, run),
        make_table=gpu.table,
    ),
}


def main() -> None:
    kind, name, mode = sys.argv[1:]
    quick = mode == "quick"
    torch.set_num_threads(1)
    if kind == "setting":
        print("\n" + json.dumps(setting(name, quick)))
    elif kind == "memory":
        print("\n" + json.dumps(memory_growth(name, quick)))
    elif kind == "callbacks":
        print("\n" + json.dumps(time_in_callbacks(name, quick)))
    elif kind == "evaluation":
        evaluate = EVALUATIONS[name](make_task("tensors", quick))
        evaluate()
        print("\n" + json.dumps(timed(evaluate)))
    else:
        task = make_task("tensors", quick)
        result = timed(DDP[name](task))
        if os.environ["RANK"] == "0":
            print("\n" + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
