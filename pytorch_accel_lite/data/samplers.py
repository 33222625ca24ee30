"""Samplers: continuing those whose order depends on earlier epochs, and checking that all processes have one order."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TypeAlias
from zlib import crc32

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from pytorch_accel_lite.base.random_generators import preserving_generators, restore_generators
from pytorch_accel_lite.base.reachable_objects import nested_in
from pytorch_accel_lite.base.types import StateDict
from pytorch_accel_lite.base.warnings_and_errors import warn_outside
from pytorch_accel_lite.data.sources import Index, SamplerLike, SourceState
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


def check_order(
    sampler: SamplerLike, order: list[Index] | None, ranks: Ranks, drawn: StateDict, resumed: StateDict | None
) -> None:
    """Check the order of an epoch, which each process has drawn itself, and store its identity in ``drawn``.

    Args:
        order: the order of a user's sampler; ``None`` for torch's samplers, whose orders depend only on the length
        drawn: the ``"length"`` of the order, if it consists of indices. For a user's sampler, the ``"checksum"`` of the
            order and the ``"batch_size"`` of the sampler, if any, are added.
        resumed: the identity from the training state, if the epoch is resumed in its middle

    Raises:
        OtherOrderError: if the order differs from the order of other processes
        WrongLengthError: if the length of the data differs from the length in the state
    """
    if order is not None:
        drawn["checksum"] = check_same_order(sampler, order, ranks)
        drawn["batch_size"] = getattr(sampler, "batch_size", None)
    if resumed is None:
        return
    before, now = resumed.get("length"), drawn["length"]
    remedy = "the training state was saved in the middle of an epoch. Resume it with the data and the sampler it was "
    remedy += "saved with, or resume a state that was saved at the end of an epoch."
    if None not in (before, now) and before != now:
        raise WrongLengthError(f"An epoch now has {now} samples, but had {before} when {remedy}")


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


def is_prepared(loader: object) -> bool:
    """Whether Accelerate has prepared a loader, which then gives each process a part of the data."""
    return any(base.__module__.startswith("accelerate.") for base in type(loader).__mro__)


#: The identity of the epoch that a run has read last: its number, the identity of its order from ``check_order``, and
#: the state of the sampler, if any, before the order was drawn.
EpochRead: TypeAlias = dict[str, SourceState]


def state_of_sampler(sampler: SamplerLike) -> SourceState:
    """Return a copy of the state that a sampler reports; ``None`` if it reports no state."""
    has_state = all(callable(getattr(sampler, name, None)) for name in ("state_dict", "load_state_dict"))
    return copy.deepcopy(sampler.state_dict()) if has_state else None


def advance_sampler(
    sampler: SamplerLike, read: EpochRead, ends: bool, draw: Callable[[SamplerLike, int], list[Index]]
) -> None:
    """Bring a user's sampler to its state at the beginning of an epoch or, with ``ends``, after the order was drawn.

    The order of most samplers depends on the epoch alone. To find out, a copy of the sampler draws the order of the
    last epoch twice. Other samplers get the state that they have reported. If that does not lead to the same order,
    they draw the orders of all earlier epochs again. With ``ends``, there is a warning if nothing leads to the same
    order.

    Args:
        draw: draws the order of an epoch from a sampler
    """
    last, state = read["epoch"], read.get("sampler")
    copied = _copied(sampler)
    if _draws_the_same(copied, read, draw) and _draws_the_same(copied, read, draw):
        return
    if state is not None:
        copied = _copied(sampler)
        if copied is not None and _loaded(copied, state) and _draws_the_same(copied, read, draw):
            sampler.load_state_dict(copy.deepcopy(state))
            if ends:
                draw(sampler, last)
            return
    for epoch in range(1, last):
        draw(sampler, epoch)
    if ends and checksum_of_indices(draw(sampler, last)) != read["checksum"]:
        warn_of_other_order(sampler, last, is_left=False)


def warn_of_other_order(sampler: SamplerLike, epoch: int, is_left: bool) -> None:
    """Warn that a sampler gives another order for an epoch than in the interrupted run.

    Args:
        is_left: whether a part of that epoch is still to be read
    """
    effect = "some samples are seen twice in it and others not at all" if is_left else "so may be those of later epochs"
    warn_outside(
        f"The sampler {type(sampler).__name__} now gives another order for epoch {epoch} than when the training state "
        f"was saved, also after those of all epochs before: {effect}, and the weights will not be those of a run that "
        "was not interrupted. Give the sampler state_dict() and load_state_dict(state), or let it draw from torch's, "
        "NumPy's or Python's generators, which are seeded for each epoch, or from the epoch that set_epoch(epoch) is "
        "given."
    )


def _copied(sampler: SamplerLike) -> SamplerLike:
    """Return a copy of a sampler that shares its data; ``None`` if it cannot be copied."""
    with suppress(Exception):
        data = [value for value in nested_in(sampler, lambda value: isinstance(value, Dataset)) if value is not sampler]
        data.append(getattr(sampler, "data_source", None))
        return copy.deepcopy(sampler, {id(value): value for value in data})
    return None


def _loaded(sampler: SamplerLike, state: SourceState) -> bool:
    with suppress(Exception):
        sampler.load_state_dict(copy.deepcopy(state))
        return True
    return False


def _draws_the_same(sampler: SamplerLike, read: EpochRead, draw: Callable[[SamplerLike, int], list[Index]]) -> bool:
    if sampler is None:
        return False
    with suppress(Exception):
        return bool(checksum_of_indices(draw(sampler, read["epoch"])) == read["checksum"])
    return False
