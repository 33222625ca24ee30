"""Digits on two workers of Ray Train; when they are killed, Ray starts them again.

    pip install "ray[train]"
    python examples/ray_train.py
    python examples/ray_train.py --kill-in-epoch 3

Trains on real digits, and prints a hash of the weights, which is the same if the
workers were killed on the way. What differs from a script without Ray are the callback,
``resume_from="latest"`` and the lines in ``main`` that start the workers.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from pytorch_accel_lite import Trainer, TrainerCallback


class Kills(TrainerCallback):
    """Kills the workers in the middle of an epoch, once."""

    def __init__(self, epoch: int, mark: Path) -> None:
        self.epoch = epoch
        self.mark = mark

    def on_train_step_end(self, trainer: Trainer, step: int, **kwargs: Any) -> None:
        if (
            trainer.progress.epoch == self.epoch
            and step == 5
            and not self.mark.exists()
        ):
            trainer.barrier()  # all of them have looked
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def train(callbacks: list[TrainerCallback], epochs: int) -> str:
    """Train, and return a hash of the weights."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
    data = TensorDataset(images, torch.tensor(digits.target))
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10)
    )
    trainer = Trainer(
        model,
        nn.CrossEntropyLoss(),
        torch.optim.AdamW(model.parameters(), lr=0.005),
        callbacks=callbacks,
        seed=0,
    )
    trainer.train(
        data,
        num_epochs=epochs,
        per_device_batch_size=32,
        resume_from="latest" if callbacks else None,
    )
    weights = b"".join(
        tensor.numpy().tobytes() for tensor in model.state_dict().values()
    )
    return hashlib.sha256(weights).hexdigest()


def train_on_worker(config: dict[str, Any]) -> None:
    """What each worker runs."""
    from pytorch_accel_lite.integrations import RayReportCallback

    torch.set_num_threads(1)
    callbacks: list[TrainerCallback] = [RayReportCallback()]
    if config["kill_in_epoch"]:
        callbacks.append(
            Kills(config["kill_in_epoch"], Path(config["folder"], "killed"))
        )
    found = train(callbacks, config["epochs"])
    Path(config["folder"], "hash").write_text(found)


def main() -> None:
    """Start the workers, and print what they found."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--kill-in-epoch", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trainer = TorchTrainer(
            train_on_worker,
            train_loop_config={"folder": folder, **vars(options)},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(
                storage_path=folder, failure_config=FailureConfig(max_failures=3)
            ),
        )
        result = trainer.fit()
        print(f"loss {result.metrics['train_loss_epoch']:.4f}")
        print(f"states reported: {len(result.best_checkpoints)}, one after each epoch")
        print(f"weights {Path(folder, 'hash').read_text()}")


if __name__ == "__main__":
    main()
