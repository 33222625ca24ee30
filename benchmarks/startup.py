"""What the package adds to the start of a program: python -m benchmarks.startup [--rounds 15].

Each figure is measured in a fresh interpreter, in turns, after torch and accelerate have been imported and a model has
been trained for a step in a plain loop. "Without compiled files" is the first import after an installation that
compiles nothing. The first step includes the construction of the trainer; that of a plain loop is subtracted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from benchmarks.report import footnote, in_rounds

KINDS = ["import", "import, without compiled files", "first step, no callbacks", "first step, default callbacks"]


def timed(action: Callable[[], Any]) -> dict[str, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    action()
    return {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}


def import_package() -> None:
    import pytorch_accel_lite  # noqa: F401


def measure(kind: str, folder: str) -> dict[str, float]:
    """Return the seconds that one part of the start takes in this interpreter."""
    import accelerate  # noqa: F401
    import torch

    from benchmarks.tasks import make_task

    torch.set_num_threads(1)
    task = make_task("tensors", quick=True)
    batch = next(iter(torch.utils.data.DataLoader(task.dataset, task.batch_size, shuffle=True)))

    def by_hand() -> None:
        model, loss_func = task.make_model(), task.loss_func
        optimizer = task.make_optimizer(model)
        loss_func(model(batch[0]), batch[1]).backward()
        optimizer.step()
        optimizer.zero_grad()

    by_hand()
    sys.dont_write_bytecode = False
    sys.pycache_prefix = tempfile.mkdtemp(dir=folder) if "without" in kind else folder
    if kind.startswith("import"):
        return timed(import_package)
    import_package()
    hand, own = timed(by_hand), timed_first_step(task, kind.endswith("default callbacks"))
    return {name: own[name] - hand[name] for name in hand}


def timed_first_step(task: Any, with_callbacks: bool) -> dict[str, float]:
    from pytorch_accel_lite import Trainer, TrainerCallback, get_default_callbacks
    from pytorch_accel_lite.callbacks import StopTrainingError

    class EndsAfterOne(TrainerCallback):
        def on_train_step_end(self, trainer: Any, **kwargs: Any) -> None:
            taken.update(cpu=time.process_time() - cpu, wall=time.perf_counter() - wall)
            raise StopTrainingError("measured")

    taken: dict[str, float] = {}
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        wall, cpu = time.perf_counter(), time.process_time()
        callbacks = [*(get_default_callbacks(progress_bar=False) if with_callbacks else ()), EndsAfterOne()]
        model = task.make_model()
        trainer = Trainer(model, task.loss_func, task.make_optimizer(model), callbacks)
        trainer.train(task.dataset, 1, None, task.batch_size, train_dataloader_kwargs={"num_workers": 0})
    return taken


def run(kind: str, folder: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.startup", "--kind", kind, "--folder", folder]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.kind:
        print(json.dumps(measure(arguments.kind, arguments.folder)))
        return
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        run(KINDS[-1], folder)  # writes the compiled files
        for _ in range(arguments.rounds):
            for kind, taken in found.items():
                taken.append(run(kind, folder))
    print("| added by the trainer, in milliseconds | CPU time: median (least) | wall time: median (least) |")
    print("|---|---|---|")
    for kind, taken in found.items():
        cells = []
        for clock in ("cpu", "wall"):
            values = [1e3 * each[clock] for each in taken]
            cells.append(f"{statistics.median(values):.0f} ({min(values):.0f})")
        print(f"| {kind} | {' | '.join(cells)} |")
    print(footnote(in_rounds(arguments.rounds)))


if __name__ == "__main__":
    main()
