"""Train a small convolutional network on handwritten digits and keep the best model.

    python examples/digits.py
    torchrun --standalone --nproc_per_node 2 examples/digits.py

The data are the 1,797 scans of the UCI "Optical Recognition of Handwritten Digits" test
set, which comes with scikit-learn.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from pytorch_accel_lite import Trainer, TrainerPlaceholderValues, get_default_callbacks
from pytorch_accel_lite.callbacks import MetricsCallback, SaveBestModelCallback


def load_datasets() -> tuple[TensorDataset, TensorDataset, TensorDataset]:
    """Split the digits 60 : 20 : 20 into training, validation and test data."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    rest, test = train_test_split(
        range(len(labels)), test_size=0.2, stratify=labels, random_state=0
    )
    train, valid = train_test_split(
        rest, test_size=0.25, stratify=labels[rest], random_state=0
    )
    train_set, valid_set, test_set = (
        TensorDataset(images[part], labels[part]) for part in (train, valid, test)
    )
    return train_set, valid_set, test_set


def load_split(name: str) -> TensorDataset:
    """Return one of the datasets, for examples/digits.yaml."""
    return dict(zip(("train", "valid", "test"), load_datasets(), strict=True))[name]


def create_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(256, 10),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs/digits"),
        help="where to save the model and the curves",
    )
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    model = create_model()
    train_set, valid_set, test_set = load_datasets()
    trainer = Trainer(
        model,
        loss_func=nn.CrossEntropyLoss(label_smoothing=0.1),
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.01),
        callbacks=[
            *get_default_callbacks(),
            MetricsCallback({"accuracy": MulticlassAccuracy(10, average="micro")}),
            SaveBestModelCallback(
                args.output / "best_model.pt", watch_metric="accuracy"
            ),
        ],
        seed=args.seed,
    )
    trainer.train(
        train_set,
        num_epochs=args.epochs,
        eval_dataset=valid_set,
        per_device_batch_size=64 // trainer.accelerator.num_processes,
        create_scheduler_fn=partial(
            OneCycleLR,
            max_lr=0.01,
            total_steps=TrainerPlaceholderValues.NUM_EPOCHS
            * TrainerPlaceholderValues.NUM_UPDATE_STEPS_PER_EPOCH,
        ),
    )
    if trainer.accelerator.is_main_process:
        trainer.run_history.plot(args.output / "curves.png")
    test_accuracy = trainer.evaluate(test_set, per_device_batch_size=64)["accuracy"]
    trainer.print(
        f"\nTest accuracy: {test_accuracy:.2%} of {len(test_set)} digits "
        "the model has never seen"
    )
    trainer.print(f"Best model: {args.output / 'best_model.pt'}")
    trainer.print(f"Curves:     {args.output / 'curves.png'}")


if __name__ == "__main__":
    main()
