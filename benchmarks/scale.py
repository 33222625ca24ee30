"""What the processes of a job send one another, by number of processes: bytes and messages, counted, not timed.

python -m benchmarks.scale [--ranks 2 4 8 16 32 64] [--ways "plain DDP loop" ours "ours, fully_shard"]

Each way is a job of gloo processes on this machine, forked from one that has imported everything, that train a small
network. Every process reads from Linux how much the TCP connections of its process have sent, so nothing escapes: other
threads, other groups, and the store through which the processes meet. A message is a segment that carries data, of up
to 64 kB on the loopback; gloo announces each transfer with one of 48 bytes. Figures are per process: the mean over the
job, and the most of any process where that is more than twice the mean.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import struct
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset
from torchmetrics import MeanSquaredError

from benchmarks.report import footnote
from pytorch_accel_lite import Trainer, TrainerCallback
from pytorch_accel_lite import callbacks as shipped
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback

UPDATES, EPOCHS, EVALUATED = 4, 2, 2  # updates an epoch, epochs, and samples that a process evaluates
_SECONDS_UNTIL_SENT = 0.02  # other threads may still be sending what belongs to the phase before
_SEGMENTS, _BYTES = 156, 200  # where tcp_info has data_segs_out and bytes_sent, since Linux 4.19


class Sent(NamedTuple):
    """What a process has sent since it began.

    Args:
        requests: messages to the store
    """

    messages: int = 0
    bytes: int = 0
    requests: int = 0


def sent() -> Sent:
    """Return what the TCP connections of this process have sent."""
    messages = total = requests = 0
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # one that is not connected, or that another thread has just closed
            if not os.readlink(entry).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                if connection.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                port = connection.getpeername()[1]
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            (segments,) = struct.unpack_from("I", info, _SEGMENTS)
            if port == int(os.environ["MASTER_PORT"]):
                requests += segments
            else:
                messages += segments
                total += struct.unpack_from("Q", info, _BYTES)[0]
    return Sent(messages, total, requests)


class Ledger:
    """Divides what this process sends among the phases of a run."""

    def __init__(self) -> None:
        self.phases: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
        self._before = Sent()

    def book(self, phase: str, times: int = 1) -> None:
        """Add what was sent since the last call to a phase.

        Args:
            times: how often it happened
        """
        time.sleep(_SECONDS_UNTIL_SENT)
        now = sent()
        since = [max(new - old, 0) for new, old in zip(now, self._before, strict=True)]  # less when one is closed
        self.phases[phase] = [a + b for a, b in zip(self.phases[phase], [times, *since], strict=True)]
        self._before = now


class Books(TrainerCallback):
    """Has a ledger, which is no part of the states of the run: a state that is loaded must not undo what was booked."""

    saves_attributes = False

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger


class First(Books):
    """Books what ends before the other callbacks are called."""

    def on_train_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self.ledger.book("update" if trainer.progress.update > 1 else "start", trainer.progress.update > 1)

    def on_epoch_checkpoint(self, trainer: Trainer, **kwargs: Any) -> None:
        self.ledger.book("end of an epoch")


class Last(Books):
    """Books what ends once the other callbacks have been called."""

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        self.ledger.book("start")

    def on_train_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
        if trainer.progress.step:
            self.ledger.book("stop consensus")
        else:
            self.ledger.book("end of an epoch" if trainer.progress.update else "start", 0)

    def on_train_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self.ledger.book("end of an epoch", 0)

    def on_eval_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self.ledger.book("evaluation, a metric")

    def on_epoch_checkpoint(self, trainer: Trainer, **kwargs: Any) -> None:
        self.ledger.book("a state saved")

    def on_training_run_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self.ledger.book("end")


def make_model() -> nn.Module:
    """Return a network of 16,641 parameters."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, 1))


def by_hand(ledger: Ledger, folder: Path) -> None:
    """Train with torch's ``DistributedDataParallel`` and nothing else."""
    dist.init_process_group("gloo")
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = torch.randn(4, 64), torch.zeros(4, 1)
    for update in range(UPDATES * EPOCHS):
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        ledger.book("update" if update else "start")


def ours(ledger: Ledger, folder: Path, sharded: bool = False) -> None:
    """Train with a trainer that evaluates a metric, saves a state an epoch and watches for hangs."""
    from pytorch_accel_lite.callbacks import MetricsCallback

    accelerator = Accelerator(cpu=True)
    ranks = accelerator.num_processes
    model = make_model()
    if sharded:
        mesh = init_device_mesh("cpu", (ranks,))
        for module in (model[0], model[2], model):
            fully_shard(module, mesh=mesh)
    saving = SaveTrainingStateCallback(folder / "states", 1, sharded=sharded, max_checkpoints=2)
    watch = shipped.HangWatchCallback(600)
    callbacks = [First(ledger), MetricsCallback(MeanSquaredError()), watch, saving, Last(ledger)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trainer = Trainer(model, nn.MSELoss(), optimizer, callbacks, accelerator=accelerator, seed=0)
    data = TensorDataset(torch.randn(4 * UPDATES * ranks, 64), torch.zeros(4 * UPDATES * ranks, 1))
    seen = TensorDataset(*(part[: EVALUATED * ranks] for part in data.tensors))
    trainer.train(data, EPOCHS, seen, per_device_batch_size=4)
    trainer.predict(seen, 4)
    ledger.book("predictions")
    trainer.load_training_state(max((folder / "states").glob("update-*")))
    ledger.book("a state loaded")


#: What each process of a job has found, by way and number of processes.
Found = dict[str, dict[int, list[dict[str, Any]]]]
WAYS: dict[str, Callable[[Ledger, Path], None]] = {
    "plain DDP loop": by_hand,
    "ours": ours,
    "ours, fully_shard": lambda ledger, folder: ours(ledger, folder, sharded=True),
}


def private_megabytes() -> float:
    """Return the memory that this process shares with no other."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


def run_rank(way: str, folder: Path, rank: int) -> None:
    """Run a process of a job, and write what it has sent."""
    ledger = Ledger()
    WAYS[way](ledger, folder)
    found = {"phases": ledger.phases, "files": len(os.listdir("/proc/self/fd")), "memory": private_megabytes()}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()  # connections stay until all have counted


def measure(way: str, ranks: int) -> list[dict[str, Any]]:
    """Return what each process of a job has found.

    Raises:
        RuntimeError: if one fails
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(ranks):
            children.append(os.fork())
            if children[-1] == 0:
                names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
                os.environ |= dict(zip(names, map(str, (rank, rank, ranks, ranks)), strict=True))
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
                code = 1
                try:
                    run_rank(way, Path(folder), rank)
                    code = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(code)
        codes = [os.waitpid(child, 0)[1] for child in children]
        if any(codes):
            raise RuntimeError(f"{way} on {ranks} processes: they ended with {codes}.")
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]


def short(values: list[float], unit: int = 1) -> str:
    """Return the mean of the processes' values, and the largest in brackets if it is more than twice that."""
    mean, most = sum(values) / len(values) / unit, max(values) / unit
    digits = 1 if unit > 1 and mean < 100 else 0
    return f"{mean:,.{digits}f}" + (f" ({most:,.{digits}f})" if most > 2 * mean and most > 1 else "")


def table(title: str, found: Found, value: Callable[[str, dict[str, Any]], dict[str, float]], unit: int = 1) -> str:
    """Return a table by number of processes, without the rows in which nothing is sent.

    Args:
        value: gives the rows of a way, by name, from what a process has found
    """
    sizes = list(next(iter(found.values())))
    lines = [f"| {title} | {' | '.join(map(str, sizes))} |", "|---" * (len(sizes) + 1) + "|"]
    for way, by_size in found.items():
        columns = [[value(way, of_rank) for of_rank in by_rank] for by_rank in by_size.values()]
        for name in columns[0][0]:
            cells = [short([of_rank[name] for of_rank in column], unit) for column in columns]
            if any(any(of_rank[name] >= 0.5 for of_rank in column) for column in columns):
                lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def sent_in_phases(place: int) -> Callable[[str, dict[str, Any]], dict[str, float]]:
    """Return what gives the messages (1), bytes (2) or requests to the store (3) of a process, each time, by phase."""
    return lambda way, of_rank: {
        f"{way}: {phase}": counts[place] / max(counts[0], 1) for phase, counts in of_rank["phases"].items()
    }


def report(found: Found) -> str:
    """Return all tables."""
    return "\n".join([
        table("Messages of a process, by number of processes", found, sent_in_phases(1)),
        table("Kilobytes that it sends", found, sent_in_phases(2), 1000),
        table("Its requests to the store", found, sent_in_phases(3)),
        table("Its open files", found, lambda way, of_rank: {way: of_rank["files"]}),
        table("Megabytes that it shares with no other", found, lambda way, of_rank: {way: of_rank["memory"]}),
    ])  # fmt: skip


def main() -> None:
    """Count, and print tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(
        report({way: {ranks: measure(way, ranks) for ranks in arguments.ranks} for way in arguments.ways}) + footnote()
    )


if __name__ == "__main__":
    main()
