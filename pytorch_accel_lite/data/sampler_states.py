"""Samplers whose order also depends on earlier epochs: continuing them in a resumed run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

from torch.utils.data import Dataset

from pytorch_accel_lite.base.display.user_warnings import warn_outside
from pytorch_accel_lite.base.random_generators.reachable_objects import nested_in
from pytorch_accel_lite.data.sampler_order_checks import checksum_of_indices
from pytorch_accel_lite.data.sources import Index, SamplerLike, SourceState

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
