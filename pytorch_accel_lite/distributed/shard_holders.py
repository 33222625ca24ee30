"""What exchanges the shards of tensors once processes of their meshes are lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pytorch_accel_lite.distributed.ranks import Ranks


@dataclass(frozen=True)
class Holders:
    """The processes that are left of those in the meshes. Together, they hold every shard.

    Args:
        ranks: lets them communicate
        positions: for each of them, its rank in the meshes
    """

    ranks: Ranks
    positions: Sequence[int]


_holders: Holders | None = None


def use_holders(holders: Holders | None) -> None:
    """Let the processes that are left exchange shards in place of the meshes, which have lost some.

    Args:
        holders: those that are left; ``None`` if all are
    """
    global _holders
    _holders = holders


def current_holders() -> Holders | None:
    """Return the processes that exchange shards in place of the meshes; ``None`` if all processes are left."""
    return _holders
