"""What is shown of a trainer, as text and in notebooks."""

from __future__ import annotations

from torch import nn
from torch.nn.parameter import UninitializedParameter

from pytorch_accel_lite.base.protocols import TrainerLike
from pytorch_accel_lite.base.reprs import short, table, wrapped
from pytorch_accel_lite.optimizers.operations import is_made


def html_of_trainer(trainer: TrainerLike) -> str | None:
    """Show the model, optimizer, device and callbacks of a trainer."""
    if "current_run" not in vars(trainer):  # its constructor has not finished
        return None
    parts = parts_of(trainer)
    listening = "\n".join(map(repr, trainer.callback_handler)) or "none"
    rows = {"model": parts.pop("model"), "parameters": parts.pop("parameters"), "loss_func": short(trainer.loss_func)}
    return table(type(trainer).__name__, (rows | parts | {"callbacks": listening}).items())


def parameter_count(model: nn.Module) -> str:
    """Return the number of parameters of a model as text; lazy modules have theirs after the first batch."""
    parameters = list(model.parameters())
    initialised = [p for p in parameters if not isinstance(p, UninitializedParameter)]
    return f"{sum(p.numel() for p in initialised):,}{'' if len(initialised) == len(parameters) else ' + ?'}"


def parts_of(trainer: TrainerLike) -> dict[str, str]:
    """Return the parts of a trainer as text, by name, omitting defaults."""
    model = trainer.get_model(keep_torch_compile=False)
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # Accelerate's wrapper, in a run
    precision = trainer.accelerator.mixed_precision
    return {
        "model": type(model).__name__,
        "parameters": parameter_count(model),
        "optimizer": type(optimizer).__name__ if is_made(optimizer) else repr(optimizer),
        "device": str(trainer.device),
        **({"processes": str(trainer.ranks.world_size)} if trainer.ranks.world_size > 1 else {}),
        **({"mixed_precision": precision} if precision != "no" else {}),
        **({} if trainer.seed is None else {"seed": str(trainer.seed)}),
    }


def of_trainer(trainer: TrainerLike) -> str:
    """Represent a trainer by its model, optimizer, device and callbacks."""
    if "current_run" not in vars(trainer):  # its constructor has not finished
        return object.__repr__(trainer)
    parts = [f"{name}={value}" for name, value in parts_of(trainer).items()]
    listening = wrapped("callbacks=[", map(repr, trainer.callback_handler), "]")
    return wrapped(f"{type(trainer).__name__}(", [*parts, listening], ")")
