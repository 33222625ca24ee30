"""How the work of each step is divided among the processes of a job."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch

from pytorch_accel_lite.base.missing_extensions import missing_extension_text
from pytorch_accel_lite.base.types import StateDict
from pytorch_accel_lite.data.batches import Batch
from pytorch_accel_lite.data.sources import BatchOutput
from pytorch_accel_lite.data.steps_and_shares import Shares
from pytorch_accel_lite.distributed import Ranks
from pytorch_accel_lite.extension_names import ARGUMENTS
from pytorch_accel_lite.run.history import MetricValue
from pytorch_accel_lite.run.losses import LossTrackers
from pytorch_accel_lite.run.training_state import TrainingState


class Division:
    """How the work of each step is divided. This class is the default: each process computes a batch of its own.

    Subclasses divide a step into a fixed number of shares and give each process some of them. The result of a share,
    and so of the run, then does not depend on the number of processes.

    Attributes:
        has_fixed_shares: whether the number of shares is fixed. Between steps, all processes then have the same random
            numbers, and the step itself adds up the gradients, without ``DistributedDataParallel``.
        argument: the trainer argument that requests this division, for messages; empty for the default
        shares: the shares that this process reads and computes; ``None`` if each process has one batch
        current: number of the share that is being computed
        outputs: the batch and the step's output for each share of this process in the latest training step, by number
            of the share; empty without shares
    """

    has_fixed_shares = False
    argument = ""
    shares: Shares | None = None

    def __init__(self) -> None:
        self.current = 0
        self.outputs: dict[int, tuple[Batch, BatchOutput]] = {}

    @property
    def count(self) -> int | None:
        """The fixed number of shares in a step; ``None`` if each process has one batch."""
        return None if self.shares is None else self.shares.total

    def check_tool(self, name: str, supports: Collection[str]) -> None:
        """Raise an error if a tool, such as ``find_lr``, does not support this division.

        Args:
            supports: the arguments of trainers that the tool supports
        """

    def check_gather(self) -> None:
        """Raise an error if the processes cannot gather now because they are not at the same point of the program."""

    def computing(self, device: torch.device) -> AbstractContextManager[None]:
        """Return a context in which runs compute."""
        return nullcontext()

    def begin_share(self, batch: Batch) -> None:
        """Begin the computation of a share. Called only if the number of shares is fixed."""

    def total_norm(self, gradients: Iterable[torch.Tensor], ranks: Ranks) -> torch.Tensor:
        """Return the total norm of gradients, whole or sharded. Called only if the number of shares is fixed."""
        raise NotImplementedError

    def create_trackers(self) -> LossTrackers:
        """Return the running losses of an epoch or an evaluation that begins."""
        return LossTrackers()

    def capture(self, ranks: Ranks, losses: LossTrackers, metrics: dict[str, MetricValue]) -> StateDict:
        """Return the state of the shares for a training state, the same on all processes. Called on every process.

        Args:
            losses: the running losses of the epoch
            metrics: values measured in the latest update
        """
        return {}

    def restore(self, state: TrainingState, losses: LossTrackers, metrics: dict[str, MetricValue]) -> None:
        """Restore the result of ``capture()``, once everything else is restored."""


#: Factories of divisions, by trainer argument: ``factory(value, ranks, seed)``. An extension adds its own.
DIVISIONS: dict[str, Callable[[int, Ranks, int | None], Division]] = {}


def create_division(argument: str, value: int | None, ranks: Ranks, seed: int | None) -> Division:
    """Return the division that an argument of a trainer requests.

    Args:
        value: the value of the argument; ``None`` for the default, one batch per process

    Raises:
        ValueError: if the extension with the argument is not installed
    """
    if value is None:
        return Division()
    if argument not in DIVISIONS:
        raise ValueError(f"{argument}={value!r} {missing_extension_text(ARGUMENTS[argument])}")
    return DIVISIONS[argument](value, ranks, seed)


def numbers_of_shares(division: Division) -> dict[str, int | None]:
    """Return the number of shares by trainer argument, as a training state records it."""
    return {argument: division.count if argument == division.argument else None for argument in DIVISIONS}
