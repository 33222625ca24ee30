"""A run on 4, then 1, then 2 processes, killed in between, ends in the same bits.

    python examples/elastic.py

Trains on real digits twice: undisturbed on one process, and on numbers of processes
that change whenever all of them are killed with SIGKILL, as when machines come and
go. Both runs print the same hash of all weights and buffers, thanks to
``logical_processes``.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset

from pytorch_accel_lite import Trainer
from pytorch_accel_lite.callbacks import SaveTrainingStateCallback


class ShiftedDigits(Dataset):
    """Digits of 8 x 8 pixels, moved by up to a pixel."""

    def __init__(self) -> None:
        digits = load_digits()
        self.images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
        self.labels = torch.tensor(digits.target)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int):
        shift = torch.randint(-1, 2, (2,)).tolist()
        return self.images[index].roll(shift, (1, 2)), self.labels[index]


def train(folder: Path, epochs: int) -> None:
    """Start the run, or resume it where it was killed, on any number of processes."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(576, 10),
    )
    trainer = Trainer(
        model,
        nn.CrossEntropyLoss(),
        torch.optim.AdamW(model.parameters(), lr=0.005),
        callbacks=[
            SaveTrainingStateCallback(folder, save_every_n_steps=1, max_checkpoints=2)
        ],
        seed=0,
        logical_processes=8,
    )
    trainer.train(
        ShiftedDigits(),
        num_epochs=epochs,
        per_device_batch_size=8,  # of a logical process: 64 samples in each update
        train_dataloader_kwargs={"num_workers": 0},
        resume_from="latest",
    )
    loss = trainer.run_history.get_latest_metric("train_loss_epoch")
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    trainer.print(f"loss {loss!r}, hash {digest.hexdigest()[:16]}")


def launch(processes: int, folder: Path, epochs: int, kill_after: int | None) -> str:
    """Run this file on some processes; kill them after an update if one is given."""
    arguments = [__file__, "--train", str(folder), "--epochs", str(epochs)]
    torchrun = ["-m", "torch.distributed.run", "--standalone"]
    if processes > 1:
        arguments = [*torchrun, f"--nproc-per-node={processes}", *arguments]
    job = subprocess.Popen(
        [sys.executable, *arguments],
        env=os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while kill_after is not None and job.poll() is None:
        saved = [int(path.name[7:]) for path in folder.glob("update-*")]
        if max(saved, default=0) >= kill_after:
            os.killpg(job.pid, signal.SIGKILL)
            print(f"{processes} processes: killed after update {max(saved)}")
            break
        time.sleep(0.01)
    output, _ = job.communicate()
    return output


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--processes", type=int, nargs="+", default=[4, 1, 2])
    parser.add_argument("--train", type=Path, metavar="FOLDER")
    arguments = parser.parse_args()
    epochs = arguments.epochs
    if arguments.train is not None:
        train(arguments.train, epochs)
        return
    results = []
    total = 29 * epochs  # updates
    for plan in ([1], arguments.processes):
        with tempfile.TemporaryDirectory() as folder:
            for number, processes in enumerate(plan, 1):
                is_last = number == len(plan)
                kill_after = None if is_last else number * total // len(plan)
                output = launch(processes, Path(folder), epochs, kill_after)
            found = re.search(r"loss .*, hash \w+", output)
            assert found is not None, output
            results.append(found[0])
            print(f"{processes} processes: finished with {results[-1]}")
    print("the same bits" if results[0] == results[1] else "other bits")


if __name__ == "__main__":
    main()
