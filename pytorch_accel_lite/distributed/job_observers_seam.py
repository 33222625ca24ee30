"""What observes the processes of a job: extensions that report where each waits, or why one is lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol

from accelerate import Accelerator

from pytorch_accel_lite.distributed.ranks import Ranks


class RunPosition(Protocol):
    """How far a run has got."""

    epoch: int
    step: int


class OpenTrainer(Protocol):
    """A trainer that is open in a process of a job, as observers and the shutdown of the job see it."""

    accelerator: Accelerator

    @property
    def ranks(self) -> Ranks: ...  # noqa: D102
    @property
    def progress(self) -> RunPosition: ...  # noqa: D102
    @property
    def is_running(self) -> bool: ...  # noqa: D102
    def close(self) -> None: ...  # noqa: D102


class JobObserver(Protocol):
    """Observes the processes of a job of several, from each of them."""

    def begin(self, ranks: Ranks) -> None:
        """Begin to observe a job, unless this has been done already. Called for each trainer, on every process."""

    def observing(self, trainer: OpenTrainer) -> AbstractContextManager[None]:
        """Observe a run within a block, on every process."""

    def find_loss(self) -> str:
        """Return which other processes are lost and, if possible, why; an empty text if that is not known."""

    def end(self, reason: str) -> None:
        """End, because this process leaves the job.

        Args:
            reason: what to tell processes that still wait for this one; empty if there is nothing to tell
        """


#: The observers of all jobs. Extensions add theirs.
OBSERVERS: list[JobObserver] = []


@contextmanager
def observed(trainer: OpenTrainer) -> Iterator[None]:
    """Let all observers observe a run within a block, on every process."""
    with ExitStack() as observing:
        for observer in OBSERVERS:
            observing.enter_context(observer.observing(trainer))
        yield
