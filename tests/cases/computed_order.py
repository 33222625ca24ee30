"""Epochs whose random order is computed, as that of very many samples is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pytorch_accel_lite import TrainerCallback
from pytorch_accel_lite.data import order
from tests.cases.common import world_size
from tests.tasks import Rows, quiet_trainer, regression_data, small_model

SIZE = 37


class Remembers(TrainerCallback):
    """Keeps the indices of the samples of each epoch, on all processes."""

    def __init__(self) -> None:
        self.epochs: list[list[int]] = []

    def on_train_epoch_start(self, trainer: Any, **kwargs: Any) -> None:
        self.epochs.append([])

    def on_train_step_end(self, trainer: Any, **kwargs: Any) -> None:
        for indices in trainer.all_gather_object(trainer.batch_indices):
            self.epochs[-1] += indices


def orders_of_epochs(wrap: Callable[[Any], Any], seed: int | None) -> list[list[int]]:
    """The samples of two epochs, in batches of 6 on all processes together."""
    remembers = Remembers()
    trainer = quiet_trainer(small_model(), callbacks=[remembers], seed=seed)
    kwargs = {"num_workers": 0}
    data = wrap(regression_data(SIZE))
    trainer.train(data, 2, per_device_batch_size=6 // world_size(), train_dataloader_kwargs=kwargs)
    return remembers.epochs


def on_ranks() -> tuple[list[list[int]], list[list[int]]]:
    """With a seed, and without one."""
    largest = order.LARGEST_STORED
    order.LARGEST_STORED = 10
    try:
        return orders_of_epochs(Rows, 3), orders_of_epochs(Rows, None)
    finally:
        order.LARGEST_STORED = largest
