"""The logical processes of a job: which of them this process computes, with which random numbers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain

import torch

from pytorch_accel_lite.extending import Batch, Division, LossTrackers, Ranks, Shares, TrainerLike, TrainingState
from pytorch_accel_lite.extension_tools.arguments_and_errors import check_positive_int
from pytorch_accel_lite.extension_tools.data_and_batches import is_number
from pytorch_accel_lite.extension_tools.metrics_and_callbacks import MetricValue
from pytorch_accel_lite.extension_tools.plain_types import StateDict
from pytorch_accel_lite.extension_tools.random_numbers import (
    capture_generators,
    derive_seed,
    deterministic_kernels,
    restore_generators,
    seed_all,
)
from pytorch_accel_lite.extensions.logical.norm_by_rows import norm_by_rows
from pytorch_accel_lite.extensions.logical.shared_losses import SharedLossTrackers


class LogicalProcesses(Division):
    """The logical processes of a trainer, of which each real process computes a contiguous range.

    A step of a logical process depends only on its number, not on the process that computes it: it has its own share
    of the data, its own random numbers, and the buffers as they were before the step.

    Args:
        value: number of logical processes
        ranks: the real processes
        seed: the seed of the trainer

    Attributes:
        shares: the shares that this process computes
        is_computing: whether a forward or backward pass of a logical process is under way in training

    Raises:
        ValueError: if they are fewer than the real processes, or the trainer has no seed
    """

    has_fixed_shares = True
    argument = "logical_processes"
    shares: Shares

    def __init__(self, value: int, ranks: Ranks, seed: int | None) -> None:
        super().__init__()
        count = check_positive_int(self.argument, value)
        if seed is None:
            raise ValueError(
                f"logical_processes={count!r} needs a seed, from which the random numbers of each of them follow. Pass "
                "seed= to the trainer."
            )
        self.shares = Shares(count, range(0), "logical process", self.argument)
        self.divide(ranks)
        self.is_computing = False

    def __repr__(self) -> str:
        local = self.shares.local
        return f"LogicalProcesses({self.count}, {local[0]} to {local[-1]} on this process)"

    @property
    def count(self) -> int:
        """The number of logical processes."""
        return self.shares.total

    def divide(self, ranks: Ranks) -> None:
        """Divide the logical processes among the current real ones.

        Raises:
            ValueError: if there are more real than logical processes
        """
        if self.count < ranks.world_size:
            raise ValueError(
                f"logical_processes={self.count!r}: there are {ranks.world_size} processes, and each needs at least "
                "one. Launch fewer processes."
            )
        self.shares.divide(ranks.rank, ranks.world_size)
        self.current = self.shares.local[0]

    def check_tool(self, name: str, supports: Collection[str]) -> None:
        """Raise an error for a tool that does not support logical processes."""
        if self.argument not in supports:
            raise ValueError(
                f"{name}() does not work with logical_processes={self.count}. Use a trainer without them: the step of "
                "one logical process is that of a trainer on one process."
            )

    def check_gather(self) -> None:
        """Raise an error within the computation of a logical process."""
        if self.is_computing:
            raise RuntimeError(
                f"gather() does not work in the forward and backward passes with logical_processes={self.count}: each "
                "process computes several of them, one after another. Call it in on_train_step_end, where it gathers "
                "the rows of all."
            )

    def begin_share(self, batch: Batch) -> None:
        """Begin the share of a logical process, with its own random numbers."""
        assert batch.share is not None
        self.current = batch.share.number
        seed_all(derive_seed(batch.share.number, after=batch.share.seed))

    def total_norm(self, gradients: Iterable[torch.Tensor], ranks: Ranks) -> torch.Tensor:
        """Return the total norm of gradients, the same bits whether they are whole or sharded along their rows."""
        return norm_by_rows(gradients, ranks)

    def create_trackers(self) -> LossTrackers:
        """Return running losses whose sums do not depend on the number of processes."""
        return SharedLossTrackers(self.shares, partial(getattr, self, "current"))

    def capture(self, ranks: Ranks, losses: LossTrackers, metrics: dict[str, MetricValue]) -> StateDict:
        """Return the state of the logical processes for a training state. Call it on every process."""
        sums = ranks.all_gather_object(losses.local_sums())
        state = {
            "losses": list(chain.from_iterable(sums)),
            "generators": capture_generators(),
            "step_metrics": {name: float(value) for name, value in metrics.items() if is_number(value)},
        }
        return {"logical": state}

    def restore(self, state: TrainingState, losses: LossTrackers, metrics: dict[str, MetricValue]) -> None:
        """Restore the result of ``capture()``; if the number of logical processes has changed, only the losses.

        Between steps, the generators are the same on all processes.
        """
        is_same = state.metadata.get(self.argument) == self.count
        saved: StateDict = state.shared["logical"] if is_same else {"losses": [state.shared["losses"]]}
        if isinstance(losses, SharedLossTrackers):
            losses.load_sums(saved["losses"])
        if is_same:
            restore_generators(saved["generators"])
            metrics.update(saved.get("step_metrics", {}))

    @contextmanager
    def computing(self, device: torch.device) -> Iterator[None]:
        """Compute the same bits everywhere in a block: with one thread on the CPU, and deterministic kernels on a GPU.

        The last bits of sums depend on the number of threads, which launchers set by the number of processes.
        """
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with nullcontext() if device.type == "cpu" else deterministic_kernels(True):
                yield
        finally:
            torch.set_num_threads(threads)


class _OfTrainer:
    """The logical processes of a trainer; ``None`` if it has none."""

    def __get__(self, trainer: TrainerLike | None, owner: type) -> LogicalProcesses | None:
        division = getattr(trainer, "division", None)
        return division if isinstance(division, LogicalProcesses) else None


#: An attribute of ``Trainer``.
logical_of_trainer = _OfTrainer()
