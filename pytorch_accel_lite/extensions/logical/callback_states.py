"""Callbacks with a state for each logical process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from pytorch_accel_lite.extension_tools.plain_types import StateDict


@runtime_checkable
class KeepsShares(Protocol):
    """A callback that keeps a state for each logical process, which changes in ``on_backward_end``.

    Under ``launch``, each process holds the states of all logical processes, as of the latest update.
    """

    def states_of_shares(self) -> list[StateDict]:
        """Return the states of the logical processes of this process, in order, as values and tensors."""

    def load_states_of_shares(self, states: Sequence[StateDict], first: int) -> None:
        """Load states that another process, or an earlier call on this one, has returned.

        Args:
            first: number of the first logical process
        """
