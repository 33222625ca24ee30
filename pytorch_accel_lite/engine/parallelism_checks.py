"""What Accelerate does wrongly for sharded models, or the trainer does not support: errors before training."""

from __future__ import annotations

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn

from pytorch_accel_lite.base.protocols import TrainerLike
from pytorch_accel_lite.optimizers.operations import is_made


def check_parallelism(accelerator: Accelerator) -> None:
    """Check that the trainer can do what the accelerator's ``parallelism_config`` asks for.

    :raises ValueError: if it cannot
    """
    if getattr(accelerator, "parallelism_config", None) is None:
        return
    sizes = {name: _parallel(accelerator, name) for name in ("cp_size", "sp_size")}
    shared = ", ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
    if shared:
        raise ValueError(
            f"The accelerator's parallelism_config has {shared}: several processes would share the samples of a "
            "sequence, which the trainer does not do. Context and sequence parallelism are not supported."
        )
    if tensor_parallel_size(accelerator) > 1 and accelerator.distributed_type == DistributedType.FSDP:
        raise ValueError(
            f"The accelerator's parallelism_config has tp_size={tensor_parallel_size(accelerator)} beside FSDP, which "
            "Accelerate cannot combine (accelerate issue 3729). Let the model come sharded: load it with transformers' "
            "distributed_config=DistributedConfig(tp_size=..., fsdp_size=...), or call parallelize_module and then "
            "fully_shard in parallelize_model(mesh); pass an Accelerator without an FSDP plugin."
        )


def tensor_parallel_size(accelerator: Accelerator) -> int:
    """Return the number of processes that share each batch according to the accelerator's ``parallelism_config``."""
    return _parallel(accelerator, "tp_size")


def _parallel(accelerator: Accelerator, size: str) -> int:
    return getattr(getattr(accelerator, "parallelism_config", None), size, 1) or 1


def check_accelerate_can_shard(trainer: TrainerLike, model: nn.Module) -> None:
    """Check that a model has nothing that Accelerate's FSDP2 is known to shard wrongly.

    :raises ValueError: if it has; says what works instead
    """
    if trainer.prepared_model is not None:
        return
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    if on_meta and trainer.optimizer is not None and is_made(trainer.optimizer):
        raise ValueError(
            "The model is on the meta device, where Accelerate's FSDP2 cannot tell the parameters of an optimizer "
            "apart (accelerate issue 3930): it would train the wrong ones without an error. Pass a function that "
            "creates the optimizer after sharding: TrainerLike(model, loss_func, functools.partial(AdamW, lr=1e-3))."
        )
    plugin = trainer.accelerator.state.fsdp_plugin
    persistent = [name for name, _ in model.named_buffers() if name in model.state_dict()]
    if persistent and getattr(plugin, "cpu_ram_efficient_loading", False):
        raise ValueError(
            "The FSDP plugin has cpu_ram_efficient_loading=True, with which Accelerate fails for buffers that are part "
            f"of the model's state (accelerate issue 3898), as {persistent[0]!r} is. Pass "
            "FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)."
        )
