"""Dividing an epoch into steps, from any position, and a step into shares, without padding or repeated samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import TypeVar

import torch

from pytorch_accel_lite.base.warnings_and_errors import warn_outside
from pytorch_accel_lite.data.batches import Batch
from pytorch_accel_lite.data.order_checks import WrongLengthError
from pytorch_accel_lite.data.sample_order import ComputedOrder
from pytorch_accel_lite.data.sources import Index, SamplerLike


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


T = TypeVar("T")
_BLOCK = 1 << 14  # samples


def global_batches(
    num_samples: int, global_batch: int, start: int = 0, drop_last: bool = False, min_last: int = 1
) -> Iterator[tuple[int, int]]:
    """Yield the bounds of the samples of each step, for all ranks together, in the order of the epoch.

    Args:
        global_batch: number of samples in a full step
        start: number of samples of the epoch already consumed
        drop_last: whether to drop a smaller last step
        min_last: if fewer than this many samples are left for the last step, the last two steps divide their samples
            evenly; evaluation uses it to keep every rank busy in every step
    """
    while start < num_samples:
        remaining = num_samples - start
        size = min(global_batch, remaining)
        if drop_last and size < global_batch:
            return
        if not drop_last and 0 < remaining - size < min_last and remaining >= 2 * min_last:
            size = (remaining + 1) // 2
        yield start, start + size
        start += size


def count_global_batches(num_samples: int, global_batch: int, drop_last: bool = False) -> int:
    """Return the number of steps in an epoch."""
    return num_samples // global_batch if drop_last else -(-num_samples // global_batch)


def indices_at(
    order: torch.Tensor | range | ComputedOrder, bounds: Iterable[tuple[int, int]]
) -> Iterator[torch.Tensor]:
    """Return the indices of each step in an order of the epoch.

    Indices are computed or copied for many steps at once, which costs little per step for any number of samples.

    Args:
        order: a tensor, a range from 0, or a computed order
        bounds: the bounds of each step, each beginning at the end of the previous one
    """
    return chain.from_iterable(_blocks(order, iter(bounds)))  # without a call of Python code in each step


def _blocks(
    order: torch.Tensor | range | ComputedOrder, bounds: Iterator[tuple[int, int]]
) -> Iterator[Sequence[torch.Tensor]]:
    for first in bounds:
        following = islice(bounds, max(_BLOCK // max(first[1] - first[0], 1) - 1, 0))
        block = [first, *following]
        begin, end = first[0], block[-1][1]
        if isinstance(order, torch.Tensor):
            indices = order[begin:end].long()
        elif isinstance(order, range):
            indices = torch.arange(begin, end)
        else:
            indices = order.at(begin, end)
        yield indices.split([stop - start for start, stop in block])  # type: ignore[no-untyped-call]


def in_turn(sampler: SamplerLike, order: Iterable[Index], start: int, sizes: list[int]) -> Iterator[Index]:
    """Yield the indices of each step, checking the length reported by the sampler."""
    size = len(sampler)
    rest = islice(order, start, None)
    position = start
    for count in sizes:
        indices = list(islice(rest, count))
        position += len(indices)
        if len(indices) < count:
            raise length_error(sampler, size, position)
        yield indices
    if position == size and list(islice(rest, 1)):  # the sampler may be endless
        warn_outside(
            f"The sampler {type(sampler).__name__} gives more indices than its length of {size}, at which the epoch "
            "ends."
        )


def length_error(sampler: object, size: int, count: int) -> WrongLengthError:
    """Return the error for a sampler whose number of indices differs from its length."""
    return WrongLengthError(
        f"The sampler {type(sampler).__name__} gives {count} indices, but its length is {size}. Make its __len__ "
        "return the number of indices that it gives."
    )


def with_last(items: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Yield each item, and whether it is the last one. Reads one item ahead."""
    iterator = iter(items)
    pending = list(islice(iterator, 1))
    for following in iterator:
        yield pending.pop(), False
        pending.append(following)
    if pending:
        yield pending.pop(), True


def grouped(items: Iterator[T], size: int) -> Iterator[list[T]]:
    """Yield lists of ``size`` items; the last may be shorter."""
    return iter(lambda: list(islice(items, size)), [])


def skip_samples(
    batches: Iterator[T], start: int, size_of: Callable[[T], int], rest_of: Callable[[T, int], T], source: str = "data"
) -> Iterator[T]:
    """Skip ``start`` samples and return what follows them.

    Args:
        rest_of: returns the last samples of a batch in the middle of which the skipped samples end
    """
    position = 0
    while position < start:
        batch = next(batches, None)
        if batch is None:
            raise early_end_error(source, f"{position} samples", start)
        position += size_of(batch)
        if position > start:
            return chain([rest_of(batch, position - start)], batches)
    return batches


def early_end_error(source: str, seen: str, done: int) -> WrongLengthError:
    """Return the error for data that end before the position from which a run resumes."""
    return WrongLengthError(
        f"The {source} ended after {seen} of this epoch, but the resumed run had already seen {done}. Resume it with "
        "the data it was saved with."
    )
