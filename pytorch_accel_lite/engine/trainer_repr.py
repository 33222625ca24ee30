"""What is shown of a trainer."""

from __future__ import annotations

from typing import Any

from torch.nn.parameter import UninitializedParameter

from pytorch_accel_lite.base.protocols import TrainerLike
from pytorch_accel_lite.base.reprs import join_wrapped
from pytorch_accel_lite.optimizers.operations import is_made


def of_trainer(trainer: TrainerLike) -> str:
    """Represent a trainer by its model, optimizer, device and callbacks, omitting defaults."""
    if "current_run" not in vars(trainer):  # its constructor has not finished
        return object.__repr__(trainer)
    model = trainer.get_model(keep_torch_compile=False)
    sizes = [0 if isinstance(p, UninitializedParameter) else p.numel() for p in model.parameters()]
    lazy = " + ?" if any(isinstance(p, UninitializedParameter) for p in model.parameters()) else ""
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # Accelerate's wrapper, in a run
    parts: dict[str, Any] = {
        "model": type(model).__name__,
        "parameters": f"{sum(sizes):,}{lazy}",
        "optimizer": type(optimizer).__name__ if is_made(optimizer) else repr(optimizer),
        "device": trainer.device,
    }
    if trainer.ranks.world_size > 1:
        parts["processes"] = trainer.ranks.world_size
    if trainer.accelerator.mixed_precision != "no":
        parts["mixed_precision"] = trainer.accelerator.mixed_precision
    if trainer.seed is not None:
        parts["seed"] = trainer.seed
    listening = join_wrapped("callbacks=[", map(repr, trainer.callback_handler), "]")
    described = [f"{name}={value}" for name, value in parts.items()]
    return join_wrapped(f"{type(trainer).__name__}(", [*described, listening], ")")
