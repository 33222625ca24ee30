"""The shares of logical processes in a step."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import torch

from pytorch_accel_lite.base.batch import Batch, Share

if TYPE_CHECKING:
    from pytorch_accel_lite.base.batch import Batch


class Shares(NamedTuple):
    """The shares of each step that this process reads.

    :param total: number of shares that a step is divided into
    :param own: numbers of those that this process reads
    """

    total: int
    own: range

    def share_at(self, number: int, place: int, ends_step: bool) -> Share:
        """Return one of them in a step."""
        return Share(number, place, ends_step)


def whole_steps(shares: Iterator[Batch]) -> Iterator[Batch]:
    """Yield a batch for each step, whose data are the batches of the shares."""
    of_step: list[Batch] = []
    for batch in shares:
        of_step.append(batch)
        assert batch.share is not None
        if batch.share.ends_step:
            own = sum(share.num_samples or 0 for share in of_step)
            parts = [share.indices for share in of_step]
            is_tensor = isinstance(batch.indices, torch.Tensor)
            indices = torch.cat(parts) if is_tensor else list(chain.from_iterable(parts))
            yield batch._replace(data=of_step, num_samples=own, indices=indices)
            of_step = []
