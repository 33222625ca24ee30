"""The parts of a trainer that the code for the processes of a job uses."""

from __future__ import annotations

from typing import Protocol

from accelerate import Accelerator

from pytorch_accel_lite.distributed.ranks import Ranks


class RunPosition(Protocol):
    """How far a run has got."""

    epoch: int
    step: int


class OpenTrainer(Protocol):
    """An open trainer in a process of a job."""

    accelerator: Accelerator

    @property
    def ranks(self) -> Ranks: ...  # noqa: D102
    @property
    def progress(self) -> RunPosition: ...  # noqa: D102
    def close(self) -> None: ...  # noqa: D102
