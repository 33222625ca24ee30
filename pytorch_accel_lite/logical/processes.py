"""The logical processes of a job: which of them this process computes, with which random numbers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from pytorch_accel_lite.batches import BatchOutput
from pytorch_accel_lite.data.loader import Batch
from pytorch_accel_lite.data.plan import Shares, split
from pytorch_accel_lite.logical.losses import SharedLossTrackers
from pytorch_accel_lite.logical.step import LogicalStep
from pytorch_accel_lite.randomness import mix, seed_all
from pytorch_accel_lite.tracking import LossTrackers
from pytorch_accel_lite.utils import check_positive_int

if TYPE_CHECKING:
    from pytorch_accel_lite.run import Run
    from pytorch_accel_lite.trainer import Trainer


class LogicalProcesses:
    """The logical processes of a trainer, of which each real process computes a contiguous range.

    A step of a logical process depends only on its number, not on the process that computes it: it has its own share
    of the data, its own random numbers, and the buffers as they were before the step.

    :param count: number of logical processes
    :ivar shares: those of this process
    :ivar outputs: batches and outputs of the latest training step, by number of the logical process
    :raises ValueError: if they are fewer than the real processes, or the trainer has no seed
    """

    def __init__(self, trainer: Trainer, count: int) -> None:
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
        self.current = self.shares.own[0]
        self.outputs: dict[int, tuple[Batch, BatchOutput]] = {}
        self._ranks = ranks

    def __repr__(self) -> str:
        own = self.shares.own
        return f"LogicalProcesses({self.count}, {own[0]} to {own[-1]} on this process)"

    def begin_share(self, batch: Batch) -> None:
        """Begin to compute the share of a logical process, with random numbers of its own."""
        assert batch.share is not None
        self.current = batch.share.number
        seed_all(mix(batch.share.number, after=batch.share.place))

    def create_trackers(self) -> LossTrackers:
        """Return running losses whose sums do not depend on the number of processes."""
        return SharedLossTrackers(self)

    def begin_training(self, trainer: Trainer, run: Run) -> None:
        """Let a training run make the steps of logical processes.

        :raises ValueError: if anything in the run does not work with them
        """
        _check(trainer, run, self.count)
        LogicalStep(trainer, run)

    @contextmanager
    def fixed_threads(self) -> Iterator[None]:
        """Compute with the same number of threads everywhere in a block, as the last bits of sums depend on it.

        This is one, as launchers set it, unless the environment variable ``OMP_NUM_THREADS`` says otherwise.
        """
        before = torch.get_num_threads()
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        try:
            yield
        finally:
            torch.set_num_threads(before)


def _check(trainer: Trainer, run: Run, count: int) -> None:
    """Raise an error for what does not work with logical processes."""
    modules = list(trainer.model.modules())
    sparse = (nn.Embedding, nn.EmbeddingBag)
    reasons = {
        "a sharded model": trainer.is_sharded,
        "an overridden train_step": run.own_step is not None,
        "an optimizer that needs a closure, nor with recompute_gradients()": run.replay is not None,
        "mixed_precision='fp16' (bf16 works)": trainer.accelerator.scaler is not None,
        "auto_microbatch=True: choose more logical processes and a smaller per_device_batch_size instead": (
            run.request.auto_microbatch
        ),
        "SkipFailedBatchesCallback": run.request.skips_failed_batches,
        "SyncBatchNorm, which mixes the batches of real processes": any(
            isinstance(module, nn.SyncBatchNorm) for module in modules
        ),
        "sparse gradients (nn.Embedding(sparse=True))": any(
            isinstance(module, sparse) and module.sparse for module in modules
        ),
    }
    for what, applies in reasons.items():
        if applies:
            raise ValueError(f"logical_processes={count} does not work with {what}.")
