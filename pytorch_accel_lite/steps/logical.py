"""The logical processes of a job: which of them this process computes, with which random numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain

import torch

from pytorch_accel_lite.base.backends import deterministic_kernels
from pytorch_accel_lite.base.randomness import capture_generators, mix, restore_generators, seed_all
from pytorch_accel_lite.base.types import StateDict
from pytorch_accel_lite.base.validation import check_positive_int
from pytorch_accel_lite.data.batches import Batch, BatchOutput, Share, is_number
from pytorch_accel_lite.data.shares import Shares, split
from pytorch_accel_lite.run.losses import LossTrackers
from pytorch_accel_lite.run.parts import TrainingState
from pytorch_accel_lite.run.state import TrainerLike
from pytorch_accel_lite.run.window import Count


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
        if count < ranks.world_size:
            raise ValueError(
                f"logical_processes={count!r}: there are {ranks.world_size} processes, and each needs at least one. "
                "Launch fewer processes."
            )
        if trainer.seed is None:
            raise ValueError(
                f"logical_processes={count!r} needs a seed, from which the random numbers of each of them follow. Pass "
                "seed= to the trainer."
            )
        self.count = count
        self.shares = Shares(count, range(*split(count, ranks.rank, ranks.world_size)))
        self.current = self.shares.local[0]
        self.outputs: dict[int, tuple[Batch, BatchOutput]] = {}
        self.is_computing = False

    def __repr__(self) -> str:
        local = self.shares.local
        return f"LogicalProcesses({self.count}, {local[0]} to {local[-1]} on this process)"

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
        return SharedLossTrackers(self.shares.local, lambda: self.current)

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
    """

    def __init__(self, numbers: Iterable[int], current: Callable[[], int]) -> None:
        super().__init__()
        self._current = current
        self.by_number = {number: LossTrackers() for number in numbers}

    def add(self, output: BatchOutput) -> None:
        """Add the losses of a share."""
        super().add(output)
        self.by_number[self._current()].add(output)

    def log(self, name: str, value: torch.Tensor | float, weight: Count) -> None:
        """Add a value of a share under its own name."""
        super().log(name, value, weight)
        self.by_number[self._current()].log(name, value, weight)

    def local_sums(self) -> list[dict[str, tuple[float, float]]]:
        """Return the sums of each logical process of this rank."""
        return [sums for trackers in self.by_number.values() for sums in trackers.local_sums()]

    def load_sums(self, sums: list[dict[str, tuple[float, float]]]) -> None:
        """Load the sums of all logical processes, in their order; those of missing ones are 0."""
        for number, trackers in self.by_number.items():
            for name, (total, count) in sums[number].items() if number < len(sums) else ():
                value = total / count if count else 0.0
                state = {"total_loss": total, "running_count": count, "loss_value": value}
                trackers.of(name).load_state_dict(state)
