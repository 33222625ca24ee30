"""Which engines, such as FSDP and DeepSpeed, checkpoints and training states work with."""

from __future__ import annotations

from accelerate import Accelerator
from accelerate.utils import DistributedType

from pytorch_accel_lite.base.modules import PLAIN_JOBS


def check_states_are_possible(accelerator: Accelerator) -> None:
    """Raise an error for engines whose weights and optimizer states cannot be gathered and verified."""
    kind = accelerator.distributed_type
    if kind not in PLAIN_JOBS and not accelerator.is_fsdp2:
        raise ValueError(
            f"Training states are not supported with {kind.value}: its weights and optimizer state cannot be gathered "
            "here. Use FSDP with fsdp_version=2, or call accelerator.save_state() in your own callback."
        )


def refuse_engines(accelerator: Accelerator, what: str, instead: str) -> None:
    """Raise an error for a call that needs the full optimizer state or sets weights, with DeepSpeed or FSDP1.

    Args:
        what: the call, for the message
        instead: what to do, as a sentence
    """
    refuse_fsdp1(accelerator, what)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        raise ValueError(f"{what} does not work with DeepSpeed, whose optimizer has parts of its own. {instead}")


def refuse_fsdp1(accelerator: Accelerator, what: str) -> None:
    """Raise an error for a call that needs full weights by name, which FSDP1 does not provide."""
    if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise ValueError(f"{what} does not work with FSDP1, whose weights are flattened. Use fsdp_version=2.")
