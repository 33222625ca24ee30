"""The batches that loaders yield: data, and how many samples this process and all processes have in a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from pytorch_accel_lite.data.sources import BatchData, BatchOutput, Index


class Share(NamedTuple):
    """One of a fixed number of shares in a step.

    Args:
        number: the number of the share
        seed: the seed of the step, a mixture of the run's seed, the epoch and the position
        ends_step: whether this is the last share of the step on this process
    """

    number: int
    seed: int
    ends_step: bool


class Batch(NamedTuple):
    """A batch of this process, with the number of samples of all processes in the same step.

    Args:
        data: the batch, on the device
        num_samples: number of samples of this process. 0 for a filler batch, see ``is_filler``. ``None`` if only the
            step knows it.
        total_samples: number of samples of all processes in this step; ``None`` if unknown, like ``num_samples``
        is_last: whether this is the last step of the epoch
        indices: indices of the samples in the dataset, as a list or a tensor; ``None`` if unknown
        share: the share with this batch, if the number of shares is fixed; ``None`` for the batch of a process. In a
            training step, it is the last share of the step, and ``data`` has the batches of all its shares.
    """

    data: BatchData
    num_samples: int | None
    total_samples: int | None
    is_last: bool
    indices: Sequence[Index] | torch.Tensor | None = None
    share: Share | None = None

    def samples(self, output: BatchOutput) -> tuple[int, int]:
        """Return the number of samples of this process and of all processes, taken from ``output`` if unknown."""
        local = int(output["batch_size"]) if self.num_samples is None else self.num_samples
        return local, local if self.total_samples is None else self.total_samples

    @property
    def is_filler(self) -> bool:
        """Whether the batch only keeps this process in step with the others, and must get no weight."""
        return self.num_samples == 0
