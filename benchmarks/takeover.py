"""How long a run takes to go on when a process is killed, and how long it takes to start it again instead."""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROGRAM = """
import os, sys, time
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import TensorDataset
from pytorch_accel_lite import Trainer, TrainerCallback

folder, width = Path(sys.argv[1]), int(sys.argv[2])


class Note(TrainerCallback):
    def on_optimizer_step_end(self, trainer, **kwargs):
        with open(folder / str(os.getpid()), "a") as file:
            file.write(f"{time.time()} {trainer.ranks.world_size} {trainer.goodput.seconds['takeover']}\\n")


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
x = torch.randn(100_000, 32)
optimizer = torch.optim.AdamW(model.parameters())
trainer = Trainer(model, nn.CrossEntropyLoss(), optimizer, [Note], seed=0, logical_processes=4)
trainer.train(TensorDataset(x, x[:, :10].argmax(1)), num_epochs=100, train_dataloader_kwargs={"num_workers": 0})
"""


def main() -> None:
    """Kill processes of a job one after another, and print how long it takes until the next update."""
    parser = argparse.ArgumentParser("python -m benchmarks.takeover", description=__doc__)
    parser.add_argument("--width", type=int, default=256, help="of the layers; 1700 makes a model of 13 MB")
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--every", type=float, default=0.0, help="seconds between two kills; 0 for as soon as possible")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    program = folder / "program.py"
    program.write_text(PROGRAM)
    notes = folder / "notes"
    notes.mkdir()
    command = [sys.executable, "-m", "pytorch_accel_lite", "launch", "--processes", "4", "--replace"]
    begin = time.time()
    job = subprocess.Popen([*command, str(program), str(notes), str(options.width)])
    try:
        wait_for(notes, begin, 4)
        started = time.time() - begin
        killing = time.time()
        seconds = [measure(notes, options.every) for _ in range(options.kills)]
        spent, took = time.time() - killing, max(float(line[2]) for line in latest(notes))
    finally:
        job.send_signal(signal.SIGTERM)
        job.wait()
    slowest = max(seconds)
    print(f"From a SIGKILL to the next update: {statistics.median(seconds):.3f} s (median), {slowest:.3f} s (slowest)")
    print(f"Takeovers took {took:.1f} s of {spent:.0f} s: {1 - took / spent:.1%} of the time was left for training")
    print(f"From a start to the first update, which is the least that a restart takes: {started:.1f} s")


def latest(notes: Path) -> list[list[str]]:
    """Return the latest notes of each process: the time, the number of processes, and the seconds of takeovers."""
    lines = (line.split() for path in notes.iterdir() for line in path.read_text().splitlines()[-50:])
    return [line for line in lines if len(line) == 3]  # one is being written


def wait_for(notes: Path, since: float, processes: int) -> float:
    """Return the time of the first update, after a given time, that this number of processes made together."""
    while True:
        times = [float(line[0]) for line in latest(notes) if line[1] == str(processes)]
        if after := [time for time in times if time > since]:
            return min(after)
        time.sleep(0.01)


def measure(notes: Path, least: float) -> float:
    """Kill a process, and return the seconds until the next update; wait until another one has taken its place.

    :param least: how long to wait at least
    """
    living = [path for path in notes.iterdir() if Path("/proc", path.name).exists()]
    before = len(list(notes.iterdir()))
    killed = time.time()
    os.kill(int(living[0].name), signal.SIGKILL)
    found = wait_for(notes, killed, 3) - killed
    while len(list(notes.iterdir())) == before:  # until another one has taken its place
        time.sleep(0.05)
    time.sleep(max(killed + least - time.time(), 0.0))
    return found


if __name__ == "__main__":
    main()
