"""How long a run takes to go on when a process is killed, and how long it takes to start it again instead.

PROCESSES in the environment is how many processes each job has.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

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
        ranks, spent = trainer.ranks, trainer.goodput.seconds.get("takeover", 0.0)
        generation = getattr(ranks, "generation", 0)
        with open(folder / str(os.getpid()), "a") as file:
            file.write(f"{time.time()} {generation} {ranks.world_size} {trainer.progress.update} {spent}\\n")


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
x = torch.randn(100_000, 32)
optimizer = torch.optim.AdamW(model.parameters())
trainer = Trainer(model, nn.CrossEntropyLoss(), optimizer, [Note], seed=0, logical_processes=4)
trainer.train(TensorDataset(x, x[:, :10].argmax(1)), num_epochs=100, train_dataloader_kwargs={"num_workers": 0})
"""
PROCESSES = int(os.environ.get("PROCESSES", 4))
LAUNCH = ("pytorch_accel_lite", "launch", "--processes", str(PROCESSES))
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(PROCESSES))
_POLLING = 0.005
_LATEST = 2000  # updates of each process that are looked at
_SECONDS_OF_TURN = 2.0
_LEFT_OUT = 0.5  # seconds after a job has been stopped, in which all timers have expired and caches are cold


class Update(NamedTuple):
    """An update, as a process has noted it.

    Attributes:
        at: the time
        spent: the seconds of takeovers until then
    """

    at: float
    generation: int
    processes: int
    number: int
    spent: float


class Turn(NamedTuple):
    """What an update took in a turn, on average.

    Attributes:
        seconds: the time that passed
        of_cores: the time of the cores, over all processes of the job and those that have started them
    """

    seconds: float
    of_cores: float


class Job:
    """A job of four processes, each of which notes its updates.

    Args:
        command: the module that starts it, and its options
    """

    def __init__(self, folder: Path, width: int, *command: str) -> None:
        self._notes = folder / "notes"
        self._notes.mkdir()
        program = folder / "program.py"
        program.write_text(PROGRAM)
        arguments = [sys.executable, "-m", *command, str(program), str(self._notes), str(width)]
        environment = {**os.environ, "ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1"}
        self._begun_at = time.time()
        self._process = subprocess.Popen(arguments, env=environment)
        self.starting = self.wait_until_all_take_part(PROCESSES) - self._begun_at

    def end(self) -> None:
        """End all processes."""
        self.signal_all(signal.SIGCONT)
        self._process.send_signal(signal.SIGTERM)
        self._process.wait()

    def updates(self) -> dict[int, list[Update]]:
        """Return the latest updates of each process that lives."""
        found = {}
        for path in self._notes.iterdir():
            if Path("/proc", path.name).exists():
                lines = [line.split() for line in path.read_text().splitlines()[-_LATEST:]]
                found[int(path.name)] = [
                    Update(float(at), int(generation), int(processes), int(number), float(spent))
                    for at, generation, processes, number, spent in (line for line in lines if len(line) == 5)
                ]
        return found

    def wait_until_all_take_part(self, processes: int) -> float:
        """Wait until this number of processes have made an update together; return when the first of them has."""
        while True:
            latest = [updates[-1] for updates in self.updates().values() if updates]
            if len(latest) == processes and {update.processes for update in latest} == {processes}:
                return max(update.at for update in latest)
            time.sleep(_POLLING)

    def kill_one(self) -> float:
        """Kill a process, and return the seconds until the others have committed the next update."""
        updates = self.updates()
        generation = max(latest[-1].generation for latest in updates.values())
        victim = random.choice([*updates])
        killed_at = time.time()
        os.kill(victim, signal.SIGKILL)
        while True:
            after = [u.at for latest in self.updates().values() for u in latest if u.generation > generation]
            if after:
                return min(after) - killed_at
            time.sleep(_POLLING)

    def seconds_of_update(self) -> float:
        """Return the median time of an update, in which nothing happened."""
        between = [
            after.at - before.at
            for updates in self.updates().values()
            for before, after in pairwise(updates)
            if before.generation == after.generation and before.processes == PROCESSES
        ]
        return statistics.median(between)

    def signal_all(self, number: int) -> None:
        """Send a signal to all processes of the job, and to those that have started them."""
        for process in _descendants(self._process.pid):
            os.kill(process, number)

    def take_turn(self) -> Turn:
        """Let a job that is stopped continue for a moment."""
        self.signal_all(signal.SIGCONT)
        time.sleep(_LEFT_OUT)
        begin, of_cores = time.time(), self._seconds_of_cores()
        time.sleep(_SECONDS_OF_TURN)
        end, of_cores = time.time(), self._seconds_of_cores() - of_cores
        self.signal_all(signal.SIGSTOP)
        latest = next(iter(self.updates().values()))
        first, *_, last = (update for update in latest if begin < update.at < end)
        updates = last.number - first.number
        return Turn((last.at - first.at) / updates, of_cores / (end - begin) * (last.at - first.at) / updates)

    def _seconds_of_cores(self) -> float:
        found = 0
        for process in _descendants(self._process.pid):
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            found += int(fields[11]) + int(fields[12])
        return found / os.sysconf("SC_CLK_TCK")

    def spent(self) -> float:
        """Return the seconds of takeovers so far."""
        return max(updates[-1].spent for updates in self.updates().values() if updates)


@contextmanager
def running(width: int, *command: str) -> Iterator[Job]:
    """A job, which is ended after the block."""
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder), width, *command)
        try:
            yield job
        finally:
            job.end()


def replaced(width: int, kills: int, every: float) -> None:
    """Kill processes of a job that replaces them, one after another, and print how long it takes.

    Args:
        every: seconds between two kills, at least
    """
    until_next, until_whole = [], []
    with running(width, *LAUNCH, "--replace") as job:
        begun_at = time.time()
        for _ in range(kills):
            time.sleep(random.uniform(0.3, 0.6))
            killed_at = time.time()
            until_next.append(job.kill_one())
            until_whole.append(job.wait_until_all_take_part(PROCESSES) - killed_at)
            time.sleep(max(killed_at + every - time.time(), 0.0))
        spent = job.spent() / (time.time() - begun_at)
        print(f"With --replace, from a SIGKILL to the next update: {_described(until_next)}")
        print(f"  until the new process takes part: {_described(until_whole)}")
        print(f"  of an update that nothing disturbs: {job.seconds_of_update():.3f} s")
        print(f"  left for training, with a kill every {(time.time() - begun_at) / kills:.0f} s: {1 - spent:.1%}")
        print(f"From a start to the first update, which is the least that a restart takes: {job.starting:.1f} s")


def lost(width: int, kills: int) -> None:
    """Kill processes of jobs that go on with fewer, down to one, and print how long it takes."""
    until_next: list[float] = []
    while len(until_next) < kills:
        with running(width, *LAUNCH) as job:
            for left in range(PROCESSES - 1, 0, -1):
                time.sleep(random.uniform(0.3, 0.6))
                until_next.append(job.kill_one())
                job.wait_until_all_take_part(left)
    print(f"Without --replace, from a SIGKILL to the next update: {_described(until_next)}")


def undisturbed(width: int, turns: int, pairs: int) -> None:
    """Print how long updates take under the command ``launch``, beside those under torchrun.

    Jobs differ by some percent, also those of the same command, and the job of a pair that is started first tends to be
    the slower one. So there are several pairs, in which each command comes first equally often. As a control, pairs of
    torchrun alone are compared in the same way.

    Args:
        turns: number of turns of each job
        pairs: number of pairs of jobs
    """
    print(f"{pairs} pairs of jobs, {turns} turns of each job:", flush=True)
    compared = {"launch, beside torchrun": LAUNCH, "torchrun, beside torchrun": TORCHRUN}
    ratios: dict[str, list[Turn]] = {name: [] for name in compared}
    for number in range(pairs):
        for name, command in compared.items():
            ratios[name].append(_ratio(width, turns, [command, TORCHRUN], swapped=bool(number % 2)))
    for name, found in ratios.items():
        print(f"  {name}:")
        print(f"    an update: {_with_error([ratio.seconds for ratio in found])}")
        print(f"    time of all cores for an update: {_with_error([ratio.of_cores for ratio in found])}")


def _ratio(width: int, turns: int, commands: list[tuple[str, ...]], swapped: bool) -> Turn:
    """Return what an update takes with the first of two commands, divided by what it takes with the second one.

    Both jobs run at the same time, but take turns: one is stopped while the other one computes. So whatever else the
    machine does slows both down alike.

    Args:
        swapped: start the second command first
    """
    order = slice(None, None, -1 if swapped else 1)
    with ExitStack() as stack:
        jobs = []
        for command in commands[order]:
            jobs.append(stack.enter_context(running(width, *command)))
            jobs[-1].signal_all(signal.SIGSTOP)
        first, second = jobs[order]
        taken: list[tuple[Turn, Turn]] = []
        for number in range(turns):
            in_turn = {job: job.take_turn() for job in jobs[:: -1 if number % 2 else 1]}  # neither always comes first
            taken.append((in_turn[first], in_turn[second]))
    return Turn(
        statistics.median(own.seconds / other.seconds for own, other in taken),
        statistics.median(own.of_cores / other.of_cores for own, other in taken),
    )


def _with_error(ratios: list[float]) -> str:
    error = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else float("nan")
    return f"{statistics.mean(ratios):.3f} of the other one, with a standard error of {error:.3f}"


def _descendants(process: int) -> list[int]:
    """Return a process and all that have come from it."""
    tasks = Path(f"/proc/{process}/task").iterdir()
    children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return [process, *(found for child in children for found in _descendants(child))]


def _described(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.3f} s (median of {len(seconds)}), {max(seconds):.3f} s (slowest)"


def main() -> None:
    """Measure with and without new processes in place of those that are lost."""
    parser = argparse.ArgumentParser("python -m benchmarks.takeover", description=__doc__)
    parser.add_argument("--width", type=int, default=256, help="of the layers; 1700 makes a model of 13 MB")
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--every", type=float, default=0.0, help="seconds between two kills; 0 for as soon as possible")
    parser.add_argument("--pairs", type=int, default=0, help="number of pairs of jobs to compare with torchrun")
    parser.add_argument("--turns", type=int, default=8, help="how often the jobs of a pair take turns")
    options = parser.parse_args()
    if options.pairs:
        undisturbed(options.width, options.turns, options.pairs)
    if options.kills:
        replaced(options.width, options.kills, options.every)
        lost(options.width, options.kills)


if __name__ == "__main__":
    main()
