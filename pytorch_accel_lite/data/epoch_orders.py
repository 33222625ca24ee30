"""The order of each epoch from a loader's sampler: checked, and in a resumed run that of the interrupted one."""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import TypeAlias

from torch.utils.data import DataLoader, Dataset, RandomSampler, SequentialSampler

from pytorch_accel_lite.base.reachable_objects import nested_in
from pytorch_accel_lite.base.warnings_and_errors import warn_outside
from pytorch_accel_lite.data.loader_base import LoaderOptions, shares_of
from pytorch_accel_lite.data.order_checks import WrongLengthError, check_same_order, checksum_of_indices
from pytorch_accel_lite.data.sample_order import Order, draw_order, of_all_processes, order_of_sampler
from pytorch_accel_lite.data.sources import Index, Sample, SamplerLike, SourceState, find_length
from pytorch_accel_lite.distributed import Ranks

#: What identifies an order: the ``"length"``, if it consists of indices; for a user's sampler with a seed, also the
#: ``"checksum"`` of the order and the ``"batch_size"`` of the sampler, if any.
OrderIdentity: TypeAlias = dict[str, SourceState]
#: What identifies an epoch: its number, ``"epoch"``, what identifies its order, and the state of the sampler before the
#: order was drawn, ``"sampler"``, if it has one.
EpochIdentity: TypeAlias = dict[str, SourceState]


class EpochOrders:
    """Draws the order of each epoch, the same on all processes.

    In a resumed run, a sampler whose order depends on earlier epochs first gets the state that it had in the
    interrupted run, and the order of an epoch that is continued is compared with the one it had then.

    Args:
        source: the ``DataLoader`` with the sampler
        ranks: the processes that read different data
        options: how the source is read

    Attributes:
        is_batched: whether the source has a batch sampler of the user's, whose batches are ordered
        sampler: the sampler of the whole order: of indices, or the user's of batches
        is_of_torch: whether the order depends on the seed and the epoch alone, as with torch's samplers
        latest: the order drawn last
        continued: the order that a resumed run continues in the middle of its epoch; ``None`` once it is drawn
        latest_epoch: the epoch begun last
        interrupted_epoch: the epoch that the interrupted run had begun last; ``None`` once the next one begins
    """

    def __init__(self, source: DataLoader[Sample], ranks: Ranks, options: LoaderOptions) -> None:
        self.is_batched = source.batch_size is None
        self.sampler: SamplerLike = source.batch_sampler if self.is_batched else source.sampler
        self.is_of_torch = type(self.sampler) in (RandomSampler, SequentialSampler)
        if not self.is_of_torch:
            self.sampler = of_all_processes(self.sampler, shares_of(options, ranks).total)
        self._ranks = ranks
        self._options = options
        self.latest: OrderIdentity = {}
        self.continued: OrderIdentity | None = None
        self.latest_epoch: EpochIdentity = {}
        self.interrupted_epoch: EpochIdentity | None = None

    @property
    def num_samples(self) -> int | None:
        """The number of samples in an epoch; ``None`` if unknown, as in batches of the user's."""
        return None if self.is_batched else find_length(self.sampler)

    def draw(self, epoch: int) -> Order:
        """Return the order of an epoch.

        Raises:
            OtherOrderError: if the order differs from the order of other processes
            WrongLengthError: if the length of the data differs from the length in the state
        """
        seed = self._options.seed
        compared = self._bring_sampler_to(epoch)
        state = None if seed is None else _state_of(self.sampler)
        order = draw_order(self.sampler, self._ranks, seed, epoch, self._options.reported_epoch(epoch))
        self.latest = {"length": self.num_samples}
        if isinstance(order, list) and seed is not None:  # without a seed, all have the order of the first process
            self.latest["checksum"] = check_same_order(self.sampler, order, self._ranks)
            self.latest["batch_size"] = getattr(self.sampler, "batch_size", None)
        if self.continued is not None:
            _check_length(self.latest["length"], self.continued.get("length"))
            self.continued = None
        if compared is not None and compared["epoch"] == epoch and compared["checksum"] != self.latest.get("checksum"):
            self._warn_of_other_order(epoch, is_left=True)
        self.latest_epoch = {"epoch": epoch, **self.latest, "sampler": state}
        return order

    def _bring_sampler_to(self, epoch: int) -> EpochIdentity | None:
        """In a resumed run, bring a user's sampler to the state that it had in the interrupted run.

        Returns:
            the epoch that the interrupted run had begun last, if its sampler had an order comparable with this one
        """
        before, self.interrupted_epoch = self.interrupted_epoch, None
        if before is None and self.continued is not None:  # the state is of an earlier version
            before = {"epoch": epoch, **self.continued}
        if before is None or self._options.seed is None or "checksum" not in before:
            return None
        if self.is_of_torch or hasattr(self.sampler, "order_of_epoch"):
            return None
        size = find_length(self.sampler)
        if size is None or before["length"] not in (None, size):
            return None
        if before["batch_size"] != getattr(self.sampler, "batch_size", None):
            return None  # with drop_last, batches of another size end elsewhere
        self._continue_from(before, ends=before["epoch"] < epoch)
        return before

    def _continue_from(self, before: EpochIdentity, ends: bool) -> None:
        """Bring the sampler to its state at the beginning of an epoch or, with ``ends``, after the order was drawn.

        The order of most samplers depends on the epoch alone. To find out, a copy of the sampler draws the order
        twice. Other samplers get the state that they have reported. If that does not lead to the same order, they draw
        the orders of all earlier epochs again. With ``ends``, there is a warning if nothing leads to the same order.
        """
        last, state = before["epoch"], before.get("sampler")
        if self._copy_draws(before, times=2):
            return
        if state is not None and self._copy_draws(before, state):
            self.sampler.load_state_dict(copy.deepcopy(state))
            if ends:
                self._order_from(self.sampler, last)
            return
        for epoch in range(1, last):
            self._order_from(self.sampler, epoch)
        if ends and checksum_of_indices(self._order_from(self.sampler, last)) != before["checksum"]:
            self._warn_of_other_order(last, is_left=False)

    def _copy_draws(self, before: EpochIdentity, state: SourceState = None, times: int = 1) -> bool:
        """Whether a copy of the sampler draws the order of an epoch again, in a state and a number of times."""
        with suppress(Exception):
            copied = _copied(self.sampler)
            if state is not None:
                copied.load_state_dict(copy.deepcopy(state))
            orders = (self._order_from(copied, before["epoch"]) for _ in range(times))
            return all(checksum_of_indices(order) == before["checksum"] for order in orders)
        return False

    def _order_from(self, sampler: SamplerLike, epoch: int) -> list[Index]:
        assert self._options.seed is not None
        return order_of_sampler(sampler, self._options.seed, epoch, self._options.reported_epoch(epoch))

    def _warn_of_other_order(self, epoch: int, is_left: bool) -> None:
        """Warn that the sampler gives another order for an epoch than in the interrupted run.

        Args:
            is_left: whether a part of that epoch is still to be read
        """
        effect = (
            "some samples are seen twice in it and others not at all" if is_left else "so may be those of later epochs"
        )
        warn_outside(
            f"The sampler {type(self.sampler).__name__} now gives another order for epoch {epoch} than when the "
            f"training state was saved, also after those of all epochs before: {effect}, and the weights will not be "
            "those of a run that was not interrupted. Give the sampler state_dict() and load_state_dict(state), or let "
            "it draw from torch's, NumPy's or Python's generators, which are seeded for each epoch, or from the epoch "
            "that set_epoch(epoch) is given."
        )


def _check_length(now: int | None, before: int | None) -> None:
    if None not in (now, before) and now != before:
        raise WrongLengthError(
            f"An epoch now has {now} samples, but had {before} when the training state was saved in the middle of an "
            "epoch. Resume it with the data and the sampler it was saved with, or resume a state that was saved at the "
            "end of an epoch."
        )


def _state_of(sampler: SamplerLike) -> SourceState:
    """Return a copy of the state that a sampler reports; ``None`` if it reports no state."""
    has_state = all(callable(getattr(sampler, name, None)) for name in ("state_dict", "load_state_dict"))
    return copy.deepcopy(sampler.state_dict()) if has_state else None


def _copied(sampler: SamplerLike) -> SamplerLike:
    """Return a copy of a sampler that shares its data."""
    data = [value for value in nested_in(sampler, lambda value: isinstance(value, Dataset)) if value is not sampler]
    data.append(getattr(sampler, "data_source", None))
    return copy.deepcopy(sampler, {id(value): value for value in data})
