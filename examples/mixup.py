"""Mixup and CutMix with timm in an overridden training step, and averaged weights.

Both the model and its averaged weights are evaluated on unmixed images.

    python examples/mixup.py

The data are those of examples/digits.py. Needs the extra ``timm``.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from torch import nn
from torch.utils.data import TensorDataset

from pytorch_accel_lite import Trainer, get_default_callbacks
from pytorch_accel_lite.callbacks import ModelEmaCallback


class MixupTrainer(Trainer):
    """Train on mixed images, whose targets are probabilities.

    ``loss_func`` is used only for evaluation.
    """

    mixup = Mixup(
        mixup_alpha=0.2,
        cutmix_alpha=1.0,
        switch_prob=0.3,
        label_smoothing=0.05,
        num_classes=10,
    )
    soft_loss = SoftTargetCrossEntropy()

    def calculate_train_batch_loss(self, batch):
        images, labels = batch
        if len(images) % 2:  # timm mixes a batch with its reverse: it must be even
            images, labels = (
                torch.cat([images, images[:1]]),
                torch.cat([labels, labels[:1]]),
            )
        images, targets = self.mixup(images.clone(), labels)  # it mixes in place
        outputs = self.model(images)
        return {
            "loss": self.soft_loss(outputs, targets),
            "model_outputs": outputs,
            "batch_size": len(batch[0]),
        }


def main() -> None:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    train, test = train_test_split(
        range(len(labels)), test_size=0.2, stratify=labels, random_state=0
    )
    test_set = TensorDataset(images[test], labels[test])
    torch.manual_seed(0)
    np.random.seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(1024, 10),
    )
    average = ModelEmaCallback(
        decay=0.98, save_path=Path(tempfile.mkdtemp()) / "ema_model.pt"
    )
    trainer = MixupTrainer(
        model,
        nn.CrossEntropyLoss(),
        torch.optim.AdamW(model.parameters(), lr=0.003),
        callbacks=[*get_default_callbacks(progress_bar=False), average],
        seed=0,
    )
    trainer.train(
        TensorDataset(images[train], labels[train]),
        num_epochs=10,
        eval_dataset=test_set,
        per_device_batch_size=32,
    )
    for name in ("last", "averaged"):
        if name == "averaged":
            trainer.load_checkpoint(average.save_path, load_optimizer=False)
        accuracy = (
            (
                trainer.predict(test_set, per_device_batch_size=64).argmax(1)
                == labels[test]
            )
            .float()
            .mean()
        )
        trainer.print(
            f"Test accuracy of the {name} weights: {accuracy:.2%} of {len(test)} digits"
        )


if __name__ == "__main__":
    main()
