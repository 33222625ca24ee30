"""A custom event, fired by an overridden step, that tells callbacks about hard batches.

    python examples/custom_event.py

Any name that starts with on_ works; an event reaches the callbacks that have a method
with its name.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from pytorch_accel_lite import Trainer, TrainerCallback, get_default_callbacks


class TrainerWithHardBatches(Trainer):
    """Fire ``on_hard_batch`` if a loss is far above the mean of the epoch so far."""

    factor = 1.8

    def train_epoch_start(self) -> None:
        super().train_epoch_start()
        self.losses: list[float] = []

    def calculate_train_batch_loss(self, batch):
        output = super().calculate_train_batch_loss(batch)
        # Reads the device in every step, which is fine for an example on the CPU.
        loss = output["loss"].item()
        if self.losses and loss > self.factor * sum(self.losses) / len(self.losses):
            self.callback_handler.call_event(
                "on_hard_batch", self, batch=batch, loss=loss
            )
        self.losses.append(loss)
        return output


class CountHardBatches(TrainerCallback):
    """Count hard batches per epoch, and remember the labels of the hardest."""

    def __init__(self) -> None:
        self.count, self.highest, self.labels = 0, 0.0, []

    def on_hard_batch(self, trainer, batch, loss, **kwargs):
        self.count += 1
        if loss > self.highest:
            self.highest, self.labels = loss, batch[1].tolist()

    def on_train_epoch_end(self, trainer, **kwargs):
        trainer.run_history.update_metric("hard_batches", self.count)
        self.count = 0


def main() -> None:
    digits = load_digits()
    data = TensorDataset(
        torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    counting = CountHardBatches()
    trainer = TrainerWithHardBatches(
        model,
        nn.CrossEntropyLoss(),
        torch.optim.Adam(model.parameters(), lr=0.005),
        callbacks=[*get_default_callbacks(progress_bar=False), counting],
        seed=0,
    )
    trainer.train(data, num_epochs=5, per_device_batch_size=8)
    counts = trainer.run_history.get_metric_values("hard_batches")
    trainer.print(f"\nHard batches per epoch: {counts}")
    trainer.print(
        f"The hardest had a loss of {counting.highest:.2f} "
        f"and the digits {counting.labels}"
    )


if __name__ == "__main__":
    main()
