"""The logical processes of a job: which of them this process computes, with which random numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Protocol, runtime_checkable

import torch

from pytorch_accel_lite.base.backends import deterministic_kernels
from pytorch_accel_lite.base.randomness import capture_generators, mix, restore_generators, seed_all
from pytorch_accel_lite.base.types import StateDict
from pytorch_accel_lite.base.validation import check_positive_int
from pytorch_accel_lite.data.batches import Batch, BatchOutput, Share, is_number
from pytorch_accel_lite.data.shares import Shares
from pytorch_accel_lite.distributed import Ranks
from pytorch_accel_lite.run.losses import LossTracker, LossTrackers
from pytorch_accel_lite.run.parts import TrainingState
from pytorch_accel_lite.run.state import TrainerLike
from pytorch_accel_lite.run.window import Count


@runtime_checkable
class KeepsShares(Protocol):
    """A callback that keeps something of each logical process, changed in ``on_backward_end``.

    In a job that outlives its processes, each process keeps that of all, as it was after the latest update.
    """

    def states_of_shares(self) -> list[StateDict]:
        """Return what is kept of the logical processes of this process, in their order, as values and tensors."""

    def load_states_of_shares(self, states: Sequence[StateDict], first: int) -> None:
        """Take over what another process has returned, or this one before.

        :param first: number of the first logical process
        """


class LogicalProcesses:
    """The logical processes of a trainer, of which each real process computes a contiguous range.

    A step of a logical process depends only on its number, not on the process that computes it: it has its own share
    of the data, its own random numbers, and the buffers as they were before the step.

    :param count: number of logical processes
    :ivar shares: those of this process
    :ivar is_computing: whether the forward or backward pass of one of them is under way in training
    :ivar outputs: batches and outputs of the latest training step, by number of the logical process
    :raises ValueError: if they are fewer than the real processes, or the trainer has no seed
    """

    def __init__(self, trainer: TrainerLike, count: int) -> None:
        ranks = trainer.ranks
        count = check_positive_int("logical_processes", count)
        if trainer.seed is None:
            raise ValueError(
                f"logical_processes={count!r} needs a seed, from which the random numbers of each of them follow. Pass "
                "seed= to the trainer."
            )
        self.count = count
        self.shares = Shares(count, range(0))
        self.divide(ranks)
        self.outputs: dict[int, tuple[Batch, BatchOutput]] = {}
        self.is_computing = False

    def __repr__(self) -> str:
        local = self.shares.local
        return f"LogicalProcesses({self.count}, {local[0]} to {local[-1]} on this process)"

    def divide(self, ranks: Ranks) -> None:
        """Divide the logical processes among the real ones, of which there may be others than before.

        :raises ValueError: if there are more of them
        """
        if self.count < ranks.world_size:
            raise ValueError(
                f"logical_processes={self.count!r}: there are {ranks.world_size} processes, and each needs at least "
                "one. Launch fewer processes."
            )
        self.shares.divide(ranks.rank, ranks.world_size)
        self.current = self.shares.local[0]

    def begin_share(self, batch: Batch) -> None:
        """Begin the share of a logical process, with its own random numbers."""
        assert batch.share is not None
        self.current = batch.share.number
        seed_all(mix(batch.share.number, after=batch.share.seed))

    def join(self, batches: list[Batch]) -> Batch:
        """Return the last step of an epoch, on a single real process, with a batch of each of them."""
        last = len(batches) - 1
        total = sum(batch.num_samples or 0 for batch in batches)
        shares = [b._replace(total_samples=total, share=Share(n, 0, n == last)) for n, b in enumerate(batches)]
        return Batch(shares, total, total, True, share=shares[-1].share)

    def create_trackers(self) -> LossTrackers:
        """Return running losses whose sums do not depend on the number of processes."""
        return SharedLossTrackers(self.shares, lambda: self.current)

    def capture(self, trainer: TrainerLike) -> StateDict:
        """Return the state of the logical processes for a training state. Call it on every process."""
        run = trainer.current_run
        losses = trainer.ranks.all_gather_object(run.loss_trackers.local_sums())
        return {
            "losses": list(chain.from_iterable(losses)),
            "generators": capture_generators(),
            "step_metrics": {name: float(value) for name, value in run.step_metrics.items() if is_number(value)},
        }

    def restore(self, trainer: TrainerLike, state: TrainingState) -> None:
        """Restore the result of ``capture()``; if the number of logical processes has changed, only the losses.

        Between steps, the generators are the same on all processes.
        """
        is_same = state.metadata.get("logical_processes") == self.count
        saved: StateDict = state.shared["logical"] if is_same else {"losses": [state.shared["losses"]]}
        run = trainer.current_run
        if isinstance(run.loss_trackers, SharedLossTrackers):
            run.loss_trackers.load_sums(saved["losses"])
        if is_same:
            restore_generators(saved["generators"])
            run.step_metrics.update(saved.get("step_metrics", {}))

    @contextmanager
    def computing_identically(self, trainer: TrainerLike) -> Iterator[None]:
        """Compute the same bits everywhere in a block: with one thread on the CPU, and deterministic kernels on a GPU.

        The last bits of sums depend on the number of threads, which launchers set by the number of processes.
        """
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with nullcontext() if trainer.device.type == "cpu" else deterministic_kernels(True):
                yield
        finally:
            torch.set_num_threads(threads)


class SharedLossTrackers(LossTrackers):
    """Running losses of this process, which are displayed, and of each of its logical processes.

    The latter are added up in the order of the logical processes for the means over all processes.

    :ivar by_number: those of each logical process; of those that others compute, as far as they have been loaded
    """

    def __init__(self, shares: Shares, current: Callable[[], int]) -> None:
        super().__init__()
        self._current = current
        self._shares = shares
        self.by_number = {number: LossTrackers() for number in range(shares.total)}

    def add(self, output: BatchOutput) -> None:
        """Add the losses of a share."""
        super().add(output)
        self.by_number[self._current()].add(output)

    def log(self, name: str, value: torch.Tensor | float, weight: Count) -> None:
        """Add a value of a share under its own name."""
        super().log(name, value, weight)
        self.by_number[self._current()].log(name, value, weight)

    @property
    def first_local(self) -> int:
        """The number of the first logical process of this rank."""
        return self._shares.local[0]

    def local_sums(self) -> list[dict[str, tuple[float, float]]]:
        """Return the sums of each logical process of this rank."""
        return [sums for number in self._shares.local for sums in self.by_number[number].local_sums()]

    def load_sums(self, sums: Iterable[dict[str, tuple[float, float]]], first: int = 0) -> None:
        """Load the sums of logical processes, in their order; those of missing ones stay as they are.

        :param first: number of the first of them
        """
        for number, by_name in zip(range(first, len(self.by_number)), sums, strict=False):
            trackers = self.by_number[number] = LossTrackers()
            for name, (total, count) in by_name.items():
                load_sum(trackers.of(name), total, count)

    def add_up_local(self) -> None:
        """Let the losses of this process be those of its logical processes, which have been others before."""
        summed: dict[str, tuple[float, float]] = {}
        for sums in self.local_sums():
            for name, (total, count) in sums.items():
                before = summed.get(name, (0.0, 0.0))
                summed[name] = before[0] + total, before[1] + count
        for name, (total, count) in summed.items():
            load_sum(self.of(name), total, count)


def load_sum(tracker: LossTracker, total: float, count: float) -> None:
    """Let a running mean have these sums."""
    value = total / count if count else 0.0
    tracker.load_state_dict({"total_loss": total, "running_count": count, "loss_value": value})
