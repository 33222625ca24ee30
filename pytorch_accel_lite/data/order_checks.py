"""Checks that the samplers of all processes give one order of samples, and the checksum of an order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from zlib import crc32

import numpy as np
import numpy.typing as npt
import torch

from pytorch_accel_lite.base.random_generators import preserving_generators, restore_generators
from pytorch_accel_lite.base.types import StateDict
from pytorch_accel_lite.base.warnings_and_errors import warn_outside
from pytorch_accel_lite.data.sources import Index, SamplerLike
from pytorch_accel_lite.distributed import Ranks

_PIECE = 1 << 16  # indices
_DRAW_FROM = (
    "Draw it from torch's, NumPy's or Python's global generators, which are seeded alike for each epoch, or from the "
    "epoch that set_epoch(epoch) is given."
)
#: What to do if processes read different data on purpose.
PASS_OWN_SHARD = "If each process should read its own part, pass OwnShard(DataLoader(...))."


class WrongLengthError(ValueError):
    """A sampler gives fewer or more indices than its length. Unlike a failed batch, this error is never skipped."""


class OtherOrderError(WrongLengthError):
    """A sampler gives a wrong order. Like a ``WrongLengthError``, it is never skipped as a failed batch."""


def check_same_order(sampler: SamplerLike, order: list[Index], ranks: Ranks) -> int:
    """Check that a sampler has drawn the same order, or piece of an order, on all processes; return its checksum.

    Raises:
        OtherOrderError: on all processes; for example if the sampler has its own generator, or divides by rank
    """
    local = len(order), checksum_of_indices(order)
    gathered = ranks.all_gather_object(local)
    if any(other != local for other in gathered):
        raise OtherOrderError(
            f"The sampler {type(sampler).__name__} gives another order on each process, of lengths "
            f"{[length for length, _ in gathered]}. Each would read only a share of its own order, so samples would be "
            f"lost and others repeated. {_DRAW_FROM} {PASS_OWN_SHARD}"
        )
    return local[1]


def warn_of_own_parts(sampler: SamplerLike, order: Sequence[Index], generators: StateDict, ranks: Ranks) -> None:
    """Warn if the sampler of a process has none of the samples of the first one's, whose order all processes share.

    Args:
        order: the order that the sampler has drawn on the first process
        generators: the states of the random generators there before, from which the others draw for comparison
    """
    own = order
    if ranks.rank > 0:
        with preserving_generators():
            restore_generators(generators)
            own = list(sampler)
    has_none = False
    with suppress(TypeError, ValueError):  # indices of some other kind
        has_none = len(order) > 0 and {*map(int, _flat(own))}.isdisjoint(map(int, _flat(order)))
    if any(ranks.all_gather_object(has_none)) and ranks.rank == 0:
        warn_outside(
            f"The sampler {type(sampler).__name__} gives other samples on each process. Without a seed, the processes "
            f"share the order of the first one, so those of the others are not read. {PASS_OWN_SHARD} Otherwise let "
            "the sampler give all samples on each process: they are divided."
        )


def _flat(order: Iterable[Index]) -> Iterator[Index]:
    """Yield the indices of an order, which may consist of batches."""
    for index in order:
        yield from index if isinstance(index, (list, tuple)) else [index]


def checksum_of_indices(indices: Sequence[Index] | torch.Tensor | npt.NDArray[np.generic]) -> int:
    """Return a checksum of indices, or of batches of indices. Other objects count by their ``repr``."""
    if isinstance(indices, torch.Tensor):
        indices = indices.detach().cpu().numpy()
    if isinstance(indices, range):
        return crc32(repr(indices).encode())
    number = 0
    for begin in range(0, len(indices), _PIECE):
        number = crc32(_as_bytes(indices[begin : begin + _PIECE]), number)
    return number


def _as_bytes(indices: Iterable[Index]) -> bytes:
    try:
        return np.fromiter(indices, np.int64).tobytes()
    except (TypeError, ValueError, OverflowError):  # not integers, but batches of indices or other keys
        return b"".join(map(_bytes_of, indices))


def _bytes_of(index: Index) -> bytes:
    if isinstance(index, (list, tuple)) or getattr(index, "ndim", False):
        return _as_bytes(index)
    shows_address = getattr(type(index), "__repr__", None) is object.__repr__
    return (type(index).__qualname__ if shows_address else repr(index)).encode()
