"""The shares of a step, without padding or repeated samples: their bounds, and which of them a process reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from pytorch_accel_lite.data.batches import Batch


def share_bounds(
    size: int, rank: int, world_size: int, min_share: int = 1, lengths: Sequence[int] = ()
) -> tuple[int, int]:
    """Return the bounds of a rank's contiguous share of ``size`` positions, which are divided as evenly as possible.

    If the positions cannot be divided evenly, the first ranks get one more. If there are too few, the last ranks get
    none.

    Args:
        min_share: the minimum number of positions of a rank, unless the rank gets none or ``size`` is smaller
        lengths: lengths of the batches that these positions form: if there is one for each rank, the batches are the
            shares
    """
    if len(lengths) == world_size and min(lengths) >= min_share:
        start = sum(lengths[:rank])
        return start, start + lengths[rank]
    sharers = max(min(world_size, size // min_share), 1)
    quotient, remainder = divmod(size, sharers)
    start = min(rank * quotient + min(rank, remainder), size)
    return start, min(start + quotient + (rank < remainder), size)


@dataclass(eq=False, slots=True)
class Shares:
    """The shares of each step that this process reads.

    Args:
        total: number of shares in a step
        local: numbers of the shares that this process reads
        owner: a noun for the owner of a share, for messages
        argument: the argument that sets the number of shares, for messages; empty if it is the number of processes
    """

    total: int
    local: range
    owner: str = "process"
    argument: str = ""

    def divide(self, rank: int, world_size: int) -> None:
        """Divide the shares among the processes again. Batches that were read by the former division become useless."""
        self.local = range(*share_bounds(self.total, rank, world_size))

    def lacking(self, world_size: int) -> int:
        """Return how many more shares than this process the busiest process reads in a step."""
        return -(-self.total // world_size) - len(self.local)


def whole_steps(shares: Iterator[Batch]) -> Iterator[Batch]:
    """Yield a batch for each step, with the batches of the shares as its data."""
    shares_of_step: list[Batch] = []
    for batch in shares:
        shares_of_step.append(batch)
        assert batch.share is not None
        if batch.share.ends_step:
            num_samples = sum(share.num_samples or 0 for share in shares_of_step)
            parts = [share.indices for share in shares_of_step if share.indices is not None]
            tensors = [part for part in parts if isinstance(part, torch.Tensor)]
            indices = torch.cat(tensors) if tensors else list(chain.from_iterable(parts))
            yield batch._replace(data=shares_of_step, num_samples=num_samples, indices=indices)
            shares_of_step = []
