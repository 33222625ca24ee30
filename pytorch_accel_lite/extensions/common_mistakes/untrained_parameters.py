"""Warnings about optimizers that have other parameters than those that are meant to be trained."""

from __future__ import annotations

from torch import nn

from pytorch_accel_lite.extending import TrainerLike
from pytorch_accel_lite.extension_tools.arguments_and_errors import warn_outside
from pytorch_accel_lite.extension_tools.optimizers_and_gradients import (
    not_optimized,
    optimized_parameters,
    other_modules,
)
from pytorch_accel_lite.extension_tools.texts_and_pages import listed


def warn_of_untrained_parameters(trainer: TrainerLike, optimized: set[nn.Parameter]) -> None:
    """Warn if the optimizer seems to be of another model, or of the model as it was before a part was replaced.

    Args:
        optimized: the parameters of all optimizers, those in attributes included
    """
    in_optimizer = optimized_parameters(trainer.optimizer)
    model, loss_func = trainer.get_model(keep_torch_compile=False), trainer.loss_func
    modules = [model, *other_modules(trainer).values()]
    in_modules = {parameter for module in modules for parameter in module.parameters()}
    if in_optimizer and in_modules.isdisjoint(in_optimizer):
        warn_outside(
            f"None of the {len(in_optimizer)} parameters of the optimizer belongs to the model, so training will not "
            "change the model, unless the optimizer works on copies. Create the optimizer from model.parameters() of "
            "the model passed to the trainer, and recreate it whenever you recreate the model."
        )
        return
    _warn_of_replaced_parts(trainer, in_optimizer, in_modules, not_optimized(model, optimized))
    if in_optimizer and isinstance(loss_func, nn.Module):
        missed = not_optimized(loss_func, {*model.parameters(), *optimized})
        if missed:
            warn_outside(
                f"{type(loss_func).__name__}, the loss function, has trainable parameters that no optimizer has: "
                f"{listed([*missed], 3)}. Create the optimizer from [*model.parameters(), *loss_func.parameters()], "
                "or call loss_func.requires_grad_(False) if they should not be trained."
            )


def _warn_of_replaced_parts(
    trainer: TrainerLike,
    in_optimizer: list[nn.Parameter],
    in_modules: set[nn.Parameter],
    untrained: dict[str, nn.Parameter],
) -> None:
    """Warn if the model seems to have got new parameters after the optimizer was created, such as a head or adapters.

    Parameters in no module may be meant, such as those of a critic: they count if they are as many as the untrained
    ones, and as many of them are matrices and vectors.
    """
    of_loss = trainer.loss_func.parameters() if isinstance(trainer.loss_func, nn.Module) else ()
    known = {*in_modules, *of_loss, *(value for value in vars(trainer).values() if isinstance(value, nn.Parameter))}
    strays = [parameter for parameter in in_optimizer if parameter not in known]
    are_alike = sorted(p.ndim for p in strays) == sorted(p.ndim for p in untrained.values())
    is_frozen = bool(in_optimizer) and not any(parameter.requires_grad for parameter in in_optimizer)
    if untrained and (are_alike or is_frozen):
        has = f"{len(strays)} parameters that are in no module" if strays else "only parameters that are frozen"
        warn_outside(
            f"No optimizer has the model's {listed([*untrained], 3)}, so they stay as they are, while the optimizer "
            f"has {has}. If parts of the model have been replaced or added, create the optimizer afterwards. "
            "Otherwise, call requires_grad_(False) on what should not be trained."
        )
