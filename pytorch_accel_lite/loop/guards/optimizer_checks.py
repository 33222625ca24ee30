"""Checks that the optimizers have the parameters that are meant to be trained."""

from __future__ import annotations

from collections.abc import Container

from torch import nn

from pytorch_accel_lite.base.display.formatting import listed
from pytorch_accel_lite.optimizers.optimizer_parts import is_created, parts_of_optimizer
from pytorch_accel_lite.run.run import TrainerLike
from pytorch_accel_lite.run.run_checks_seam import RUN_CHECKS
from pytorch_accel_lite.run.trainer_parts.parameters_of_optimizers import all_optimized_parameters


def check_optimizers(trainer: TrainerLike) -> None:
    """Check that the optimizers have all parameters that are meant to be trained.

    If a factory has not created the optimizer yet, the check is made once it has.
    """
    if not is_created(trainer.optimizer):
        return
    parts, optimized = parts_of_optimizer(trainer.optimizer), set(all_optimized_parameters(trainer))
    missed = not_optimized(trainer.get_model(keep_torch_compile=False), optimized) if parts else {}
    if missed:
        raise ValueError(
            f"None of the optimizers {', '.join(map(repr, parts))} has the model's {listed([*missed], 3)}. Add them to "
            "one of the optimizers, or call requires_grad_(False) on those that should not be trained."
        )
    for check in RUN_CHECKS.of_optimizer:
        check(trainer, optimized)


def not_optimized(module: nn.Module, optimized: Container[nn.Parameter]) -> dict[str, nn.Parameter]:
    """Return the trainable parameters of a module that no optimizer has, by name."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad and p not in optimized}
