"""The training step of a model with sharded weights, with only as much communication as an update needs."""

from __future__ import annotations

import torch

from pytorch_accel_lite.extending import Batch, BatchOutput, PlainStep, Run, TrainerLike
from pytorch_accel_lite.extension_tools.modules_and_devices import local_shard
from pytorch_accel_lite.extension_tools.optimizers_and_gradients import parameters_not_in_model
from pytorch_accel_lite.extensions.sharding.data_ranks import covers, is_hybrid, mesh_infos


class ShardedStep(PlainStep):
    """Reduces the gradients of modules sharded by ``fully_shard`` only at the end of a window.

    Over a mesh of one dimension, gradients are kept unsharded and reduced once. Over two dimensions (HSDP), they are
    sharded over the first dimension in every step, which takes less memory, and reduced over the second dimension once.
    """

    def __init__(self, trainer: TrainerLike, run: Run) -> None:
        super().__init__(trainer, run)
        from torch.distributed.fsdp import FSDPModule  # takes a second to import

        self._fsdp_modules = [module for module in trainer.model.modules() if isinstance(module, FSDPModule)]
        self._reduces = True
        for sharded in self._fsdp_modules:  # a run that failed within a window may have disabled reduction
            sharded.set_requires_gradient_sync(True, recurse=False)

    def begin_replicas(self, trainer: TrainerLike, run: Run) -> None:
        """Make buffers, and plain parameters beside sharded ones, such as adapters, the same on all processes.

        In tensor parallelism without ``fully_shard``, this includes shards that several processes train on different
        data.
        """
        super().begin_replicas(trainer, run)
        model = trainer.model
        parameters = [*model.parameters(), *parameters_not_in_model(model, trainer.optimizer)]
        self.averaged = [parameter for parameter in parameters if not covers(parameter, run.data.ranks)]
        buffers = {name: buffer for name, buffer in model.named_buffers() if _is_unsharded(buffer)}
        run.ranks.copy_from_first([*filter(_is_unsharded, self.averaged), *buffers.values()])
        run.data.ranks.copy_from_first([local_shard(shard) for shard in self.averaged if not _is_unsharded(shard)])
        changing = set(model.state_dict())  # constants are usually not in the state
        names = [name.rpartition(".") for name in buffers if name in changing]
        self.synced_buffers += [(model.get_submodule(owner), name) for owner, _, name in names]

    def forward_backward(self, trainer: TrainerLike, run: Run, batch: Batch) -> BatchOutput | None:
        """Run the usual step, and reduce the gradients if the step ends a window."""
        if run.window.steps > 1:
            self._set_reduction(trainer.accelerator.sync_gradients)
        return super().forward_backward(trainer, run, batch)

    def _set_reduction(self, ends_window: bool) -> None:
        if ends_window == self._reduces:
            return
        self._reduces = ends_window
        for module in self._fsdp_modules:
            if any(map(is_hybrid, mesh_infos(module))):
                module.set_requires_all_reduce(ends_window, recurse=False)
            else:
                module.set_requires_gradient_sync(ends_window, recurse=False)


def _is_unsharded(tensor: torch.Tensor) -> bool:
    return not hasattr(tensor, "device_mesh")
