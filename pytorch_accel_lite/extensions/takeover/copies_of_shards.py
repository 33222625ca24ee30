"""Continuing a sharded run after a process is lost whose shards have copies on other processes, as in HSDP."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection

from pytorch_accel_lite.extending import TrainerLike, every_part_is_held
from pytorch_accel_lite.extensions.logical import LogicalWindow
from pytorch_accel_lite.extensions.takeover.joining import temporary_folder
from pytorch_accel_lite.extensions.takeover.membership import Membership


class UpdateUnderWay:
    """An update of a sharded run that has not changed any shard yet.

    Args:
        restore: restores everything else that the update has changed
    """

    def __init__(
        self, trainer: TrainerLike, window: LogicalWindow, membership: Membership, restore: Callable[[], None]
    ) -> None:
        self._trainer = trainer
        self._window = window
        self._membership = membership
        self._restore = restore

    def held(self, holders: Collection[int]) -> int:
        """Return the number of updates after which every shard is held by one of these; -1 if some are lost.

        Args:
            holders: the processes that are left, by their ranks in the meshes
        """
        generation = self._membership.generation
        assert generation is not None
        if len(set(generation.machines)) > 1:  # the state could not be read everywhere
            return -1
        self._restore()
        weights = self._trainer.get_model(keep_torch_compile=False).state_dict().values()
        is_held = all(every_part_is_held(weight, holders) for weight in weights)
        return self._trainer.progress.update if is_held else -1

    def save(self, holders: Collection[int]) -> str:
        """Save a state in memory, of which each process writes its shards, and return its folder.

        Nothing communicates over the meshes, which have a lost process.
        """
        trainer, window, membership = self._trainer, self._window, self._membership
        ranks = trainer.ranks
        membership.fetched = temporary_folder()
        folder = membership.fetched.name
        directory = os.path.join(ranks.broadcast_object(lambda: folder), "state")
        window.restart()
        window.filled = 0
        ranks.holders = holders
        try:
            trainer.save_training_state(directory, sharded=True)
        finally:
            ranks.holders = None
        trainer.print(
            "The weights were sharded, and others had the shards of each lost process, too. All go on from update "
            f"{trainer.progress.update}."
        )
        return directory
