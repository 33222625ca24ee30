"""Metrics in a callback and in the loop, for a model and its averaged weights.

    python examples/metrics.py

Both ways give the same accuracy. The callback needs no subclass, and is exact on any
number of processes. The data are those of examples/digits.py.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from digits import create_model, load_datasets
from torch import nn
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from pytorch_accel_lite import Trainer, get_default_callbacks
from pytorch_accel_lite.callbacks import MetricsCallback, ModelEmaCallback


class AccuracyTrainer(Trainer):
    """A trainer that measures the accuracy in the loop."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # As an attribute, it is moved to the device.
        self.accuracy = MulticlassAccuracy(10, average="micro")

    def calculate_eval_batch_loss(self, batch: Any) -> dict[str, Any]:
        output = super().calculate_eval_batch_loss(batch)
        self.accuracy.update(output["model_outputs"], batch[1])
        return output

    def eval_epoch_end(self) -> None:
        self.run_history.update_metric(
            "accuracy_in_the_loop", self.accuracy.compute().item()
        )
        self.accuracy.reset()


def make_metrics() -> MetricsCallback:
    return MetricsCallback(
        {
            "accuracy": MulticlassAccuracy(10, average="micro"),
            "f1": MulticlassF1Score(10),
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    epochs = parser.parse_args().epochs
    torch.manual_seed(0)
    model = create_model()
    average = ModelEmaCallback(
        decay=0.98, save_path=None, warmup=True, callbacks=[make_metrics()]
    )
    trainer = AccuracyTrainer(
        model,
        nn.CrossEntropyLoss(),
        torch.optim.AdamW(model.parameters(), lr=3e-3),
        callbacks=[average, make_metrics(), *get_default_callbacks(progress_bar=False)],
    )
    train_set, valid_set, _ = load_datasets()
    trainer.train(train_set, epochs, valid_set, per_device_batch_size=32)
    latest = trainer.run_history.get_latest_metric
    trainer.print(
        f"in the callback: {latest('accuracy'):.4f}, "
        f"in the loop: {latest('accuracy_in_the_loop'):.4f}"
    )
    trainer.print(f"with averaged weights: {latest('ema_model_accuracy'):.4f}")


if __name__ == "__main__":
    main()
