"""Before a run with a sharded model: sharding it, checking it, and dividing the data."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pytorch_accel_lite.base.inspection import is_overridden
from pytorch_accel_lite.base.protocols import TrainerLike
from pytorch_accel_lite.distributed.layout import find_data_ranks
from pytorch_accel_lite.engine.meta_models import place_model
from pytorch_accel_lite.engine.parallelism_checks import check_accelerate_can_shard, tensor_parallel_size

if TYPE_CHECKING:
    from pytorch_accel_lite.engine.run import Run

if TYPE_CHECKING:
    from pytorch_accel_lite.engine.run import Run


def begin(trainer: TrainerLike, run: Run, has_own_way: bool) -> None:
    """Prepare for a run with a sharded model. Call it on every process.

    :param has_own_way: whether the trainer's class overrides ``parallelize_model``
    """
    if run.outer is not None:
        return
    if has_own_way:
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
    run.data.ranks = find_data_ranks(model, trainer.ranks)
    wanted = tensor_parallel_size(trainer.accelerator)
    if wanted not in (1, run.data.ranks.replicas):
        raise ValueError(
            f"The accelerator's parallelism_config has tp_size={wanted}, but {run.data.ranks.replicas} process(es) "
            f"share the weights of {type(model).__name__} by tensor parallelism. Load the model with tp_plan='auto' "
            "and the accelerator's device mesh, or call parallelize_module on it, before you create the trainer."
        )
    if run.data.ranks.replicas > 1 and run.data.seed is None:  # what is read at random must be the same
        run.data.seed = trainer.ranks.broadcast_object(lambda: int(torch.randint(2**62, ()).item()))


def begin_sharded(trainer: TrainerLike, run: Run) -> None:
    """Shard the model if the trainer's class does so, and divide the data of a run as the meshes of its weights do."""
    has_own_way = is_overridden(trainer, "parallelize_model")
    is_parallel = trainer.is_sharded or getattr(trainer.accelerator, "parallelism_config", None) is not None
    if has_own_way or (is_parallel and trainer.ranks.world_size > 1):
        begin(trainer, run, has_own_way)
