"""Checking more often that all processes train the same weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytorch_accel_lite.events import TrainerCallback
from pytorch_accel_lite.utils import check_positive_int

if TYPE_CHECKING:
    from pytorch_accel_lite.trainer import Trainer


class ReplicaCheckCallback(TrainerCallback):
    """Checks every so often that all processes hold the same weights, to the last bit.

    The trainer itself does so after the first update and after each epoch; see :meth:`Trainer.compare_replicas`.
    Each check reads the device once.

    :param every_n_updates: updates from one check to the next
    """

    def __init__(self, every_n_updates: int = 100) -> None:
        self.every_n_updates = check_positive_int("every_n_updates", every_n_updates)

    def on_update_end(self, trainer: Trainer, **kwargs: Any) -> None:
        if trainer.progress.update % self.every_n_updates == 0:
            trainer.compare_replicas()
