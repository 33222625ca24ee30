"""Saving and resuming against torch's own functions on the same tensors: python -m benchmarks.saving [--rounds 7].

Both sides run in turns in one process, first in a folder on a disk and then in one in memory. A state is also checked
for finite weights, hashed, synced and verified, which ``torch.save`` and ``torch.load`` are not. Times are lower
quartiles; memory is how far the process grew at most, including files that it mapped.

An asynchronous save pauses training for a copy. The first copy of a run needs new memory, and later ones are written
into the same memory, which a plain loop may do, too, or allocate it each time: each has a row.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.report import footnote, in_rounds
from pytorch_accel_lite import Trainer
from pytorch_accel_lite.checkpoint.disk.background_writer import BackgroundWriter

WIDTH = 3200


class Cost(NamedTuple):
    """What an action took: seconds, seconds of CPU time, and the bytes by which the process grew at most."""

    wall: float
    cpu: float
    memory: float


def resident(entry: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith(entry))


@contextmanager
def measured(costs: list[Cost]) -> Iterator[None]:
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak to what is resident now
    before = resident("VmRSS")
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    costs.append(Cost(time.perf_counter() - wall, time.process_time() - cpu, resident("VmHWM") - before))


class Saver:
    """A trained model with its momentum, and the ways to save and load both in a folder."""

    def __init__(self, millions: float, folder: Path) -> None:
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(max(round(millions * 1e6 / WIDTH**2), 1))]
        self.model = nn.Sequential(*layers)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.trainer = Trainer(self.model, nn.MSELoss(), optimizer, callbacks=(), seed=0)
        self.trainer.train(TensorDataset(torch.randn(2, WIDTH), torch.randn(2, WIDTH)), 1, per_device_batch_size=2)
        self.writer = BackgroundWriter(self.trainer.accelerator)
        self.kept = [torch.empty_like(tensor) for tensor in self.tensors()]
        self.folder = folder

    def tensors(self) -> list[torch.Tensor]:
        states: Any = self.trainer.optimizer.state.values()
        return [*self.model.parameters(), *(state["momentum_buffer"] for state in states)]

    def save_by_hand(self, costs: list[Cost]) -> None:
        path = self.folder / "by_hand.pt"
        path.unlink(missing_ok=True)
        with measured(costs), open(path, "wb") as file:
            torch.save({"model": self.model.state_dict(), "optimizer": self.trainer.optimizer.state_dict()}, file)
            file.flush()
            os.fsync(file.fileno())

    def save(self, costs: list[Cost]) -> None:
        shutil.rmtree(self.folder / "state", ignore_errors=True)
        with measured(costs):
            self.trainer.check_weights()  # as SaveTrainingStateCallback does
            self.trainer.save_training_state(self.folder / "state")

    def copy(self, costs: list[Cost]) -> None:
        with measured(costs):
            copies = [tensor.detach().clone() for tensor in self.tensors()]
        del copies

    def copy_into_kept(self, costs: list[Cost]) -> None:
        with measured(costs), torch.no_grad():
            for kept, tensor in zip(self.kept, self.tensors(), strict=True):
                kept.copy_(tensor)

    def pause(self, costs: list[Cost], writer: BackgroundWriter | None = None) -> None:
        writer = writer or self.writer
        shutil.rmtree(self.folder / "background", ignore_errors=True)
        with measured(costs):
            self.trainer.check_weights()
            self.trainer.save_training_state(self.folder / "background", writer=writer)
        writer.wait()

    def first_pause(self, costs: list[Cost]) -> None:
        self.pause(costs, BackgroundWriter(self.trainer.accelerator))

    def load_by_hand(self, costs: list[Cost]) -> None:
        with measured(costs):
            content = torch.load(self.folder / "by_hand.pt", weights_only=True)
        del content

    def load_by_hand_into_model(self, costs: list[Cost]) -> None:
        with measured(costs):
            content = torch.load(self.folder / "by_hand.pt", weights_only=True)
            self.model.load_state_dict(content["model"])
            self.trainer.optimizer.load_state_dict(content["optimizer"])
            del content

    def load(self, costs: list[Cost]) -> None:
        with measured(costs):
            self.trainer.load_training_state(self.folder / "state")


def compare(saver: Saver, rounds: int) -> Iterator[str]:
    """Yield the rows of a table."""
    pairs: dict[str, tuple[Callable[[list[Cost]], None], Callable[[list[Cost]], None]]] = {
        "save: `torch.save`, synced": (saver.save_by_hand, saver.save),
        "asynchronous save, the first pause: a copy": (saver.copy, saver.first_pause),
        "asynchronous save, later pauses: a copy into new memory": (saver.copy, saver.pause),
        "asynchronous save, later pauses: a copy into kept memory": (saver.copy_into_kept, saver.pause),
        "resume: `torch.load`": (saver.load_by_hand, saver.load),
        "resume: the same, `load_state_dict`": (saver.load_by_hand_into_model, saver.load),
    }
    for name, (by_hand, ours) in pairs.items():
        found: tuple[list[Cost], list[Cost], list[Cost]] = ([], [], [])
        for number in range(rounds + 1):
            for action, costs in zip((by_hand, ours, by_hand), found, strict=True):
                action(costs if number else [])  # the first round creates what later ones reuse
        hand, own, again = ({field: quartile(costs, field) for field in Cost._fields} for costs in found)
        memory = max(cost.memory for cost in found[0]), max(cost.memory for cost in found[1])
        yield (
            f"| {name} | {hand['wall']:.2f} s | {own['wall']:.2f} s | {own['wall'] / hand['wall']:.2f} "
            f"| {own['cpu'] / hand['cpu']:.2f} | {again['wall'] / hand['wall']:.2f} "
            f"| {memory[0] / 2**20:,.0f} MiB | {memory[1] / 2**20:,.0f} MiB |"
        )


def quartile(costs: list[Cost], field: str) -> float:
    values: list[float] = [getattr(cost, field) for cost in costs]
    return statistics.quantiles(values, n=4)[0] if len(values) > 1 else values[0]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.saving", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--millions", type=float, default=100, help="millions of parameters; each has a momentum")
    parser.add_argument("--folders", type=Path, nargs="+", default=[Path(tempfile.gettempdir()), Path("/dev/shm")])
    parser.add_argument("--threads", type=int, help="threads of torch; as many as cores by default")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    for parent in arguments.folders:
        print(f"| in `{parent}` | plain loop | ours | ratio | of CPU time | control | memory, plain loop | ours |")
        print("|---|---|---|---|---|---|---|---|")
        with tempfile.TemporaryDirectory(dir=parent) as folder:
            for row in compare(Saver(arguments.millions, Path(folder)), arguments.rounds):
                print(row, flush=True)
        size = f"{arguments.millions:g} million parameters and their momentum"
        print(footnote(in_rounds(arguments.rounds), size, f"Threads: {torch.get_num_threads()}") + "\n")


if __name__ == "__main__":
    main()
