"""Warnings of what has no effect: assigned arguments, rates under a schedule, parameters that are not trained."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR

from pytorch_accel_lite.extending import Run, TrainerCallback, TrainerLike
from pytorch_accel_lite.extension_tools.arguments_and_errors import (
    is_from_this_package,
    library_attributes,
    warn_outside,
)
from pytorch_accel_lite.extension_tools.optimizers_and_gradients import (
    Options,
    format_rates,
    not_optimized,
    optimized_parameters,
    other_modules,
    scheduled_options,
    schedulers_in,
)
from pytorch_accel_lite.extension_tools.texts_and_pages import listed, to_number, wrapped


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


def check_rates(trainer: TrainerLike, run: Run, initial: Options | None) -> None:
    """Name rates of the optimizer that a schedule replaces, that an earlier schedule has left, or that nothing scales.

    Args:
        initial: see ``RunChecks.of_schedule``
    """
    if initial is not None and trainer.scheduler is None:
        _print_leftover_rates(trainer, initial)
    elif initial is not None:
        _print_unused_rates(trainer, initial)
    if run.ranks.rank == 0 and any("lr_scale" in group for group in trainer.optimizer.param_groups):
        _warn_of_unused_scales(trainer)


def _warn_of_unused_scales(trainer: TrainerLike) -> None:
    """Warn if nothing applies the ``lr_scale`` that timm's layer decay has put into parameter groups."""
    schedulers = schedulers_in(trainer.scheduler).values()
    applies = any(
        getattr(type(part), "applies_lr_scale", False) or hasattr(part, "update_groups") for part in schedulers
    )
    if applies or not _has_unused_scales(trainer.optimizer):
        return
    kind = "no scheduler" if trainer.scheduler is None else f"{type(trainer.scheduler).__name__}, which is not known to"
    warn_outside(
        "The optimizer's parameter groups have different lr_scale, as timm's layer decay sets them, but the same "
        f"learning rate: only some schedulers apply it, and the run has {kind}. Pass a schedule by name, such as "
        "create_scheduler_fn='constant', or use TrainerWithTimmScheduler; or multiply the rates before training: for "
        "group in optimizer.param_groups: group['lr'] *= group['lr_scale']"
    )


def _print_leftover_rates(trainer: TrainerLike, initial: Options) -> None:
    """Name the learning rates of a run without a scheduler, if an earlier schedule has left them over."""
    now = scheduled_options(trainer.optimizer)
    if now != initial:
        current, first = ([values.get("lr") for values in options] for options in (now, initial))
        trainer.print(
            f"This run has no scheduler and trains at the learning rate {format_rates(current)}, left over from "
            f"an earlier schedule; the optimizer started at {format_rates(first)}. To return to that: for group "
            "in trainer.optimizer.param_groups: group['lr'] = group['initial_lr']"
        )


def _print_unused_rates(trainer: TrainerLike, initial: Options) -> None:
    """Name the learning rates that the user gave an optimizer, if a schedule with its own rates replaces them."""
    groups = trainer.optimizer.param_groups
    rates = {id(group): values.get("lr") for group, values in zip(groups, initial, strict=True)}
    for scheduler in schedulers_in(trainer.scheduler).values():
        if not isinstance(scheduler, (OneCycleLR, CyclicLR)):
            continue
        optimizer = scheduler.optimizer
        default = inspect.signature(type(optimizer)).parameters.get("lr")
        groups = optimizer.param_groups
        highest = scheduler.max_lrs if isinstance(scheduler, CyclicLR) else [group["max_lr"] for group in groups]
        used = [*highest, *scheduler.base_lrs, *([default.default] if default else [])]
        # Rates in tensors are rounded, so rates are compared as they are shown.
        as_shown = {format_rates([rate]) for rate in used if isinstance(rate, (int, float, torch.Tensor))}
        unused = [rate for group in groups if format_rates([rate := rates.get(id(group))]) not in {"none", *as_shown}]
        if unused:
            message = (
                f"The optimizer's learning rate {format_rates(unused)} has no effect: {type(scheduler).__name__} sets "
                f"rates of its own, up to max_lr={format_rates(highest)}. Pass the rate that you want as max_lr, and "
                "leave out lr."
            )
            trainer.print(wrapped(message))


def _has_unused_scales(optimizer: Optimizer) -> bool:
    """Whether groups of different ``lr_scale`` train at the same rate, so that nothing has applied it.

    In a warm-up from 0, the initial rates are compared.
    """
    scales: dict[float, float] = {}
    for group in optimizer.param_groups:
        rate = to_number(group.get("lr")) or group.get("initial_lr")
        if rate and "lr_scale" in group and scales.setdefault(rate, group["lr_scale"]) != group["lr_scale"]:
            return True
    return False


def warn_of_assignments(trainer: TrainerLike, run: Run) -> None:
    """Warn of attributes of the trainer that would have to be arguments. A subclass may have them for itself."""
    if run.ranks.rank != 0:
        return
    assigned = vars(trainer).keys() - library_attributes(trainer)
    if "callbacks" in assigned:
        _warn_of_callbacks(trainer, vars(trainer)["callbacks"])
    if not is_from_this_package(type(trainer)):
        return
    for name in sorted(assigned - {"callbacks"}):
        for method, called in (("__init__", "Trainer"), ("train", "train")):
            if name in inspect.signature(getattr(type(trainer), method)).parameters:
                warn_outside(f"trainer.{name} = ... has no effect. Pass {called}({name}=...).")
                break


def _warn_of_callbacks(trainer: TrainerLike, callbacks: object) -> None:
    """Warn of callbacks in ``trainer.callbacks`` that are not called."""
    called = list(trainer.callback_handler)
    ignored = [
        type(one).__name__
        for one in (callbacks if isinstance(callbacks, Iterable) else ())
        if isinstance(one, TrainerCallback) and one not in called
    ]
    if ignored:
        warn_outside(
            f"trainer.callbacks = [...] has no effect, so {listed(ignored)} will not be called. Add callbacks by "
            "trainer.callback_handler.add_callback(...), and remove them by remove_callback(...)."
        )
