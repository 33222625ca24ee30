"""Before a run with a sharded model: sharding it, checking it, and dividing the data."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pytorch_accel_lite.sharding.faults import check_accelerate_can_shard, tensor_parallel_size
from pytorch_accel_lite.sharding.layout import find_data_ranks

if TYPE_CHECKING:
    from pytorch_accel_lite.run import Run
    from pytorch_accel_lite.trainer import Trainer


def begin(trainer: Trainer, run: Run, has_own_way: bool) -> None:
    """Prepare for a run with a sharded model. Call it on every process.

    :param has_own_way: whether the trainer's class overrides ``parallelize_model``
    """
    if run.outer is not None:
        return
    if has_own_way:
        from pytorch_accel_lite.sharding.placing import place_model

        place_model(trainer)
    model = trainer.get_model(keep_torch_compile=False)
    if trainer.accelerator.is_fsdp2:
        check_accelerate_can_shard(trainer, model)
    elif any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(
            f"{type(model).__name__} has parameters on the meta device, which have no values. Shard it in an "
            "overridden parallelize_model(mesh) of the trainer, which then gives them values; or call "
            "model.to_empty(device=...) and initialise them before you create the trainer."
        )
    run.data_ranks = find_data_ranks(model, trainer.ranks)
    wanted = tensor_parallel_size(trainer.accelerator)
    if wanted not in (1, run.data_ranks.replicas):
        raise ValueError(
            f"The accelerator's parallelism_config has tp_size={wanted}, but {run.data_ranks.replicas} process(es) "
            f"share the weights of {type(model).__name__} by tensor parallelism. Load the model with tp_plan='auto' "
            "and the accelerator's device mesh, or call parallelize_module on it, before you create the trainer."
        )
    if run.data_ranks.replicas > 1 and run.data_seed is None:  # what is read at random must be the same
        run.data_seed = trainer.ranks.broadcast_object(lambda: int(torch.randint(2**62, ()).item()))
