"""What callbacks keep of each logical process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from pytorch_accel_lite.extending_callbacks import StateDict


@runtime_checkable
class KeepsShares(Protocol):
    """A callback that keeps something of each logical process, changed in ``on_backward_end``.

    In a job that outlives its processes, each process keeps that of all, as it was after the latest update.
    """

    def states_of_shares(self) -> list[StateDict]:
        """Return what is kept of the logical processes of this process, in their order, as values and tensors."""

    def load_states_of_shares(self, states: Sequence[StateDict], first: int) -> None:
        """Take over what another process has returned, or this one before.

        Args:
            first: number of the first logical process
        """
