"""Continuing a sharded run after the loss of a process whose shards have replicas on other processes, as in HSDP."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from pytorch_accel_lite.extending import Run, TrainerLike
from pytorch_accel_lite.extension_tools.processes import Holders, use_holders
from pytorch_accel_lite.extension_tools.runs_and_steps import replaced
from pytorch_accel_lite.extension_tools.states_and_files import every_part_is_held
from pytorch_accel_lite.extensions.logical import LogicalWindow, sharded_modules
from pytorch_accel_lite.extensions.sharding import mesh_infos, shard_dim
from pytorch_accel_lite.extensions.takeover.joining_processes import memory_folder
from pytorch_accel_lite.extensions.takeover.membership import Membership
from pytorch_accel_lite.extensions.takeover.restart import ProgramRestart

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


class RunShards:
    """The shards of a run during its training.

    If the processes that remain after a loss hold every shard, they exchange shards without the device meshes, repeat
    the interrupted action and continue until the next update, which needs the meshes. Before it, they save a state, and
    the program restarts from that.

    Attributes:
        has_ended: whether the training is over, so that no update follows
    """

    def __init__(self, trainer: TrainerLike, run: Run, membership: Membership) -> None:
        self._trainer = trainer
        self._run = run
        self._membership = membership
        assert membership.generation is not None
        self._members = membership.generation.members  # by their ranks in the meshes
        self._folder: str | None = None
        self.has_ended = False

    def are_held(self, members: Sequence[int], machines: Sequence[int]) -> bool:
        """Whether these processes hold every shard, and can all read the state that they save."""
        if self._parent(machines) is None or not set(members) <= set(self._members):
            return False
        positions = self._positions(members)
        weights = self._trainer.get_model(keep_torch_compile=False).state_dict().values()
        everyone = list(range(len(self._members)))
        meshes = [cast(Any, weight).device_mesh.mesh for weight in weights if hasattr(weight, "device_mesh")]
        return all(sorted(mesh.flatten().tolist()) == everyone for mesh in meshes) and all(
            every_part_is_held(weight, positions) for weight in weights
        )

    def _parent(self, machines: Sequence[int]) -> Path | None:
        """Return the folder for the state: in memory on one machine, else next to the run's training states."""
        if len(set(machines)) == 1:
            return memory_folder()
        sources = self._run.request.state_sources
        folders = [str(getattr(source, "save_dir", None) or "") for source in sources]
        return next((Path(folder) for folder in folders if folder and "://" not in folder), None)

    def _make_folder(self) -> str:
        if self._folder is None:  # else it was created in an attempt that a loss interrupted
            assert self._membership.generation is not None
            parent = self._parent(self._membership.generation.machines)
            assert parent is not None  # see are_held()
            parent.mkdir(parents=True, exist_ok=True)
            self._folder = tempfile.mkdtemp(prefix=".begin-again-", dir=parent)
        return self._folder

    def _positions(self, members: Sequence[int]) -> list[int]:
        return [self._members.index(member) for member in members]

    def bypass_meshes(self, members: Sequence[int]) -> None:
        """Make these processes exchange shards without the device meshes."""
        positions = self._positions(members)
        use_holders(Holders(self._trainer.ranks, positions))
        for module in sharded_modules(self._trainer.model):
            module.set_custom_all_gather(cast(Any, _GatherFromHolders(module, positions, self._membership)))

    def end(self) -> None:
        """End the training. If the meshes have lost a process, restart first and end it then.

        Raises:
            ProgramRestart: if the meshes have lost a process
        """
        if self._membership.bypasses_meshes and self._run.end.pause is None:
            self.save_and_restart()
        self.has_ended = True

    def save_and_restart(self) -> None:
        """Save a sharded state, and restart the program from it.

        Raises:
            ProgramRestart: always; if the state cannot be saved, the restart uses an earlier one
        """
        self.save()
        raise ProgramRestart

    def save(self) -> None:
        """Save the state for the restart, together with the other processes."""
        self._membership.check_is_first_training()
        # If all have resumed from a state and made no update since, that state is used again.
        if self._membership.restart.state is not None or self._can_write_state():
            self._trainer.print(
                "The weights were sharded, and others had the shards of each lost process, too. All go on from update "
                f"{self._trainer.progress.update}."
            )
        self._membership.restart.request(has_entered=True)

    def _can_write_state(self) -> bool:
        restart, trainer, window = self._membership.restart, self._trainer, self._run.window
        assert isinstance(window, LogicalWindow)
        window.restart()
        window.filled = 0
        try:
            restart.folder = trainer.ranks.result_of_first(self._make_folder)
            restart.state = os.path.join(restart.folder, "state")
            with replaced(trainer, current_run=self._run):
                trainer.save_training_state(restart.state, sharded=True)
        except OSError as error:
            print(f"The shards could not be saved: {error}", file=sys.stderr)
            return False
        return True


class _GatherFromHolders:
    """Replaces torch's all-gather of the weights of a sharded module.

    Args:
        positions: for each remaining process, its rank in the mesh
    """

    def __init__(self, module: FSDPModule, positions: Sequence[int], membership: Membership) -> None:
        [info] = mesh_infos(module)
        ranks, dim = info.mesh.mesh, shard_dim(info)
        shards = [int((ranks == position).nonzero()[0, dim]) for position in positions]
        self._sources = [shards.index(number) for number in range(ranks.shape[dim])]
        self._membership = membership

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        rows = self._membership.gather(input_tensor.view(torch.uint8)).view(input_tensor.dtype)
        for whole, source in zip(output_tensor.chunk(len(self._sources)), self._sources, strict=True):
            whole.copy_(rows[source])
