"""Pretrain on the digits 0 to 4, fine-tune on 5 to 9, unfreezing layer by layer.

    python examples/finetuning.py
    torchrun --standalone --nproc_per_node 2 examples/finetuning.py

The new head is trained first, then one more group of layers every two epochs. The data
are those of examples/digits.py. Only ten scans of each digit from 5 to 9 are used for
fine-tuning, so starting from a pretrained model pays off.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from pytorch_accel_lite import Trainer, TrainerCallback, get_default_callbacks
from pytorch_accel_lite.callbacks import GradualUnfreezingCallback
from pytorch_accel_lite.finetuning import ModelFreezer


def load_half(digits: range) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the images of a range of digits, and their labels counted from 0."""
    data = load_digits()
    images, labels = (
        torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16,
        torch.tensor(data.target),
    )
    chosen = (labels >= digits.start) & (labels < digits.stop)
    return images[chosen], labels[chosen] - digits.start


def split(
    images: torch.Tensor, labels: torch.Tensor, per_class: int
) -> tuple[TensorDataset, TensorDataset]:
    """Split off the first ``per_class`` scans of each class for training."""
    position = torch.stack([(labels == label).cumsum(0) for label in range(5)])[
        labels, torch.arange(len(labels))
    ]
    train = position <= per_class
    return TensorDataset(images[train], labels[train]), TensorDataset(
        images[~train], labels[~train]
    )


def block(channels_in: int, channels_out: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, padding=1),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )


class DigitsModel(nn.Module):
    """A small convolutional network whose attributes are the layer groups."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = block(1, 32)
        self.body = block(32, 64)
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(256, 5))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.stem(images)))


class AccuracyCallback(TrainerCallback):
    """Measure the accuracy of every evaluation over all processes."""

    def on_eval_epoch_start(self, trainer, **kwargs):
        self.correct = torch.zeros(2, device=trainer.device)

    def on_eval_step_end(self, trainer, batch, batch_output, **kwargs):
        hits = batch_output["model_outputs"].argmax(1) == batch[1]
        self.correct += torch.stack(
            [hits.sum(), torch.tensor(len(hits), device=trainer.device)]
        )

    def on_eval_epoch_end(self, trainer, **kwargs):
        right, seen = (
            trainer.tensor_to_numeric(number, reduce="sum") for number in self.correct
        )
        trainer.run_history.update_metric("accuracy", right / seen)


def train(
    name: str,
    model: nn.Module,
    parameters: Iterable[Any],
    data: tuple[Any, Any],
    epochs: int,
    callbacks: list[Any],
) -> None:
    trainer = Trainer(
        model,
        nn.CrossEntropyLoss(),
        torch.optim.AdamW(parameters, lr=0.01),
        callbacks=[
            *get_default_callbacks(progress_bar=False),
            AccuracyCallback(),
            *callbacks,
        ],
        seed=0,
    )
    per_device = 32 // trainer.accelerator.num_processes
    trainer.train(
        data[0],
        num_epochs=epochs,
        eval_dataset=data[1],
        per_device_batch_size=per_device,
    )
    accuracy = trainer.run_history.get_latest_metric("accuracy")
    trainer.print(
        f"\n{name}: {accuracy:.2%} of {len(data[1])} digits the model has never seen\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=6, help="epochs per phase")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = DigitsModel()
    train(
        "Pretraining",
        model,
        model.parameters(),
        split(*load_half(range(5)), 140),
        args.epochs,
        [],
    )

    few = split(*load_half(range(5, 10)), 10)
    model.head[1].reset_parameters()
    freezer = ModelFreezer(model, freeze_batch_norms=True)
    freezer.freeze(set_modules_as_eval=True)
    train("Head alone", model, freezer.get_trainable_parameters(), few, args.epochs, [])

    unfreezing = GradualUnfreezingCallback(every_n_epochs=2)
    train(
        "Gradual unfreezing",
        model,
        model.head.parameters(),
        few,
        args.epochs,
        [unfreezing],
    )


if __name__ == "__main__":
    main()
