"""The interface of compiled forward passes, as steps and trainers see them.

It is not in ``steps/compile_step_seam.py``, whose compiler takes a trainer, because a trainer has a compiled pass.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from pytorch_accel_lite.data import Batch
from pytorch_accel_lite.data.loss_functions import LossFunction
from pytorch_accel_lite.data.sources import BatchData, BatchOutput
from pytorch_accel_lite.run.accumulation import Count


class CompiledForwardLike(Protocol):
    """A compiled ``calculate_train_batch_loss``.

    Attributes:
        logged: the values logged during compilation: name, value and weight of each
    """

    logged: list[tuple[str, torch.Tensor | float, Count | None]]

    def disable(self, reason: str) -> None:
        """Compute all further batches without compilation, and warn once of the reason."""

    def __call__(self, batch: BatchData) -> BatchOutput:
        """Return the output of the trainer's method."""

    def outputs_and_loss(
        self, model: nn.Module, loss_func: LossFunction | None, batch: BatchData, read: Batch | None
    ) -> BatchOutput:
        """Return the output of the trainer's ``BatchAdapter``, as far as it may be traced."""
