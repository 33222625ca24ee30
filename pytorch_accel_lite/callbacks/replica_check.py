"""Frequent checks that all processes train the same weights."""

from __future__ import annotations

from typing import Any

from pytorch_accel_lite.base.events import TrainerCallback
from pytorch_accel_lite.base.protocols import TrainerLike
from pytorch_accel_lite.base.validation import check_positive_int


class ReplicaCheckCallback(TrainerCallback):
    """Check every n updates that all processes hold bit-identical weights.

    The trainer itself checks after the first update and after each epoch; see :meth:`Trainer.compare_replicas`.
    Each check reads from the device once.

    :param every_n_updates: number of updates between checks
    """

    def __init__(self, every_n_updates: int = 100) -> None:
        self.every_n_updates = check_positive_int("every_n_updates", every_n_updates)

    def on_update_end(self, trainer: TrainerLike, **kwargs: Any) -> None:
        if trainer.progress.update % self.every_n_updates == 0:
            trainer.compare_replicas()
