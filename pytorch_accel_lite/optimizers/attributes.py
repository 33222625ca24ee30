"""Attributes of a trainer besides its model: heads, critics, teachers, metrics and their optimizers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn

from pytorch_accel_lite.base.modules import local
from pytorch_accel_lite.base.protocols import TrainerLike
from pytorch_accel_lite.optimizers.operations import is_made, optimized_parameters, set_mode

_SAVED_BY_THEMSELVES = ("model", "optimizer", "scheduler", "registered_objects")


def modules(trainer: TrainerLike) -> dict[str, nn.Module]:
    """Return the modules that are attributes, by name, including the loss function but not the model."""
    return _find(trainer, lambda value: isinstance(value, nn.Module))


def buffers_in(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, str]]:
    """Return the buffers of modules and their parts, each by the part and its name there."""
    parts = (part for module in modules for part in module.modules())
    return [(part, name) for part in parts for name, _ in part.named_buffers(recurse=False)]


def optimizers(trainer: TrainerLike) -> dict[str, Any]:
    """Return the optimizers that are attributes, by name, except the trainer's own."""
    groups = getattr(trainer.optimizer, "param_groups", None)  # the same for Accelerate's wrapper
    attributes = _find(trainer, lambda value: isinstance(value, torch.optim.Optimizer))
    return {name: optimizer for name, optimizer in attributes.items() if optimizer.param_groups is not groups}


def registered(trainer: TrainerLike) -> dict[str, Any]:
    """Return the objects registered with the trainer, by name, or with its ``Accelerator``, by class and number.

    Excludes the model, the optimizer and the scheduler, which are saved anyway.
    """
    optimizer = trainer.optimizer
    saved = [trainer.model, trainer.get_model(), optimizer, getattr(optimizer, "optimizer", None), trainer.scheduler]
    ids = set(map(id, [*saved, *trainer.registered_objects.values()]))
    others = enumerate(getattr(trainer.accelerator, "_custom_objects", ()))
    named = {f"accelerator.{type(obj).__name__}.{number}": obj for number, obj in others if id(obj) not in ids}
    return {**trainer.registered_objects, **named}


def all_optimized_parameters(trainer: TrainerLike) -> list[nn.Parameter]:
    """Return the parameters of the trainer's optimizer, which may be yet to be made, and of those in attributes."""
    if is_made(trainer.optimizer):
        optimized = list(optimized_parameters(trainer.optimizer))
    elif trainer.optimizer is None:
        optimized = []
    else:
        optimized = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    return [*optimized, *chain.from_iterable(map(optimized_parameters, optimizers(trainer).values()))]


def weights_are_finite(trainer: TrainerLike) -> bool:
    """Whether all trained parameters are finite and no buffer is NaN, on any process. Reads from the device.

    Call it on every process.
    """

    def largest(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
        """Return the largest absolute value, which is NaN if any is."""
        kept = [local(t) for t in tensors if t.is_floating_point() and t.itemsize > 1]
        return torch.nn.utils.get_total_norm([t for t in kept if t.numel()], norm_type=math.inf)

    of_model = trainer.model.parameters() if trainer.is_sharded else ()
    finite = bool(largest([*of_model, *all_optimized_parameters(trainer)]).isfinite())
    finite = finite and not bool(largest(trainer.model.buffers()).isnan())  # they may be infinite, as masks are
    return not trainer.ranks.max([float(not finite)])[0]


def trained(trainer: TrainerLike) -> dict[str, Any]:
    """Return the attributes that are saved with the trainer, by name: trained modules, optimizers and schedulers.

    Excludes what is saved anyway: the model, the loss function and their parts, the optimizer, registered objects.
    """
    if not trainer.saves_attributes:
        return {}
    optimized = set(map(id, all_optimized_parameters(trainer)))
    saved = set(map(id, [*registered(trainer).values(), trainer.loss_func, trainer.scheduler]))
    seen = {id(parameter) for module in (trainer.model, trainer.loss_func) for parameter in _parameters(module)}
    attributes: dict[str, Any] = {}
    for name, module in modules(trainer).items():
        parameters = set(map(id, _parameters(module))) - seen
        if id(module) not in saved and parameters & optimized:
            attributes[name] = module
            seen |= parameters
    attributes |= {name: value for name, value in optimizers(trainer).items() if id(value) not in saved}
    schedulers = _find(trainer, is_scheduler)
    return attributes | {name: value for name, value in schedulers.items() if id(value) not in saved}


def untrained(trainer: TrainerLike) -> list[str]:
    """Return the names of modules that have parameters but none that is trained: teachers, averaged weights."""
    optimized = set(map(id, all_optimized_parameters(trainer)))
    saved = set(map(id, [*registered(trainer).values(), trainer.loss_func]))
    in_model = set(map(id, trainer.model.parameters()))
    others = {name: module for name, module in modules(trainer).items() if id(module) not in saved}
    parameters_by_name = {name: set(map(id, _parameters(module))) - in_model for name, module in others.items()}
    return [name for name, parameters in parameters_by_name.items() if parameters and not parameters & optimized]


def set_optimizer_modes(trainer: TrainerLike, training: bool) -> None:
    """Set the mode of all optimizers that have modes."""
    if trainer.prepared_model is not None:
        trainer.prepared_model.trains = training
    for optimizer in (trainer.optimizer, *optimizers(trainer).values()):
        set_mode(optimizer, training)


@contextmanager
def evaluating_optimizers(trainer: TrainerLike) -> Iterator[None]:
    """Set optimizers that have modes to evaluation mode for a block."""
    if trainer.prepared_model is None or not trainer.prepared_model.trains:
        yield
        return
    set_optimizer_modes(trainer, training=False)
    try:
        yield
    finally:
        set_optimizer_modes(trainer, training=True)


def _find(trainer: TrainerLike, is_wanted: Callable[[Any], bool]) -> dict[str, Any]:
    """Return the attributes of a kind, including elements of lists, tuples and dicts, named like ``critics.0``."""
    result = {}
    for name, value in vars(trainer).items():
        if name in _SAVED_BY_THEMSELVES:
            continue
        if is_wanted(value):
            result[name] = value
        elif isinstance(value, (list, tuple, dict)):
            parts = value.items() if isinstance(value, dict) else enumerate(value)
            result |= {f"{name}.{key}": part for key, part in parts if is_wanted(part)}
    return result


def _parameters(module: Any) -> list[nn.Parameter]:
    return list(module.parameters()) if isinstance(module, nn.Module) else []


def is_scheduler(value: Any) -> bool:
    """Whether a value is a scheduler."""
    if isinstance(value, (nn.Module, torch.optim.Optimizer)):
        return False
    return all(hasattr(value, name) for name in ("optimizer", "step", "state_dict", "load_state_dict"))
