"""What a trainer trains: the parameters of its optimizers; modules, optimizers and schedulers in its attributes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Protocol, TypeGuard, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from pytorch_accel_lite.base.sharded_weights import local_shard
from pytorch_accel_lite.base.types import HasStateDict
from pytorch_accel_lite.optimizers.optimizer_parts import is_created, optimized_parameters
from pytorch_accel_lite.optimizers.optimizer_steps import set_mode
from pytorch_accel_lite.optimizers.optimizer_types import SchedulerLike
from pytorch_accel_lite.run.run import TrainerLike

T = TypeVar("T")

_SAVED_SEPARATELY = ("model", "optimizer", "scheduler", "registered_objects")


class AttachedScheduler(SchedulerLike, Protocol):
    """A scheduler with an attribute for the optimizer that it changes."""

    optimizer: Optimizer


def other_modules(trainer: TrainerLike) -> dict[str, nn.Module]:
    """Return the modules that are attributes, by name, including the loss function but not the model."""
    return instances_in(trainer, nn.Module)


def other_optimizers(trainer: TrainerLike) -> dict[str, Optimizer]:
    """Return the optimizers that are attributes, by name, except the trainer's ``optimizer``."""
    groups = getattr(trainer.optimizer, "param_groups", None)  # Accelerate's wrapper has the same groups
    attributes = instances_in(trainer, Optimizer)
    return {name: optimizer for name, optimizer in attributes.items() if optimizer.param_groups is not groups}


def other_schedulers(trainer: TrainerLike) -> dict[str, AttachedScheduler]:
    """Return the schedulers that are attributes, by name, except the trainer's ``scheduler``."""
    return _find(trainer, is_scheduler)


def registered_objects(trainer: TrainerLike) -> dict[str, HasStateDict]:
    """Return the objects registered with the trainer, by name, or with its ``Accelerator``, by class and number.

    Excludes the model, the optimizer and the scheduler, which are always saved.
    """
    optimizer = trainer.optimizer
    saved = [trainer.model, trainer.get_model(), optimizer, getattr(optimizer, "optimizer", None), trainer.scheduler]
    ids = set(map(id, [*saved, *trainer.registered_objects.values()]))
    others = enumerate(getattr(trainer.accelerator, "_custom_objects", ()))
    named = {f"accelerator.{type(obj).__name__}.{number}": obj for number, obj in others if id(obj) not in ids}
    return {**trainer.registered_objects, **named}


def buffers_in(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, str]]:
    """Return the buffers of modules and their submodules, each as a submodule and a name in it."""
    parts = (part for module in modules for part in module.modules())
    return [(part, name) for part in parts for name, _ in part.named_buffers(recurse=False)]


def instances_in(trainer: TrainerLike, kind: type[T]) -> dict[str, T]:
    """Return the attributes of a class, also elements of lists, tuples and dicts, with names like ``critics.0``."""

    def is_one(value: object) -> TypeGuard[T]:
        return isinstance(value, kind)

    return _find(trainer, is_one)


def _find(trainer: TrainerLike, is_wanted: Callable[[object], TypeGuard[T]]) -> dict[str, T]:
    """Return the attributes of a kind, also elements of lists, tuples and dicts, with names like ``critics.0``."""
    result = {}
    for name, value in vars(trainer).items():
        if name in _SAVED_SEPARATELY:
            continue
        if is_wanted(value):
            result[name] = value
        elif isinstance(value, (list, tuple, dict)):
            parts = value.items() if isinstance(value, dict) else enumerate(value)
            result |= {f"{name}.{key}": part for key, part in parts if is_wanted(part)}
    return result


def parameters_in(owner: object) -> list[nn.Parameter]:
    """Return the parameters of a module; none of anything else."""
    return list(owner.parameters()) if isinstance(owner, nn.Module) else []


def is_scheduler(value: object) -> TypeGuard[AttachedScheduler]:
    """Whether a value is a scheduler."""
    if isinstance(value, (nn.Module, Optimizer)):
        return False
    return all(hasattr(value, name) for name in ("optimizer", "step", "state_dict", "load_state_dict"))


def all_optimized_parameters(trainer: TrainerLike) -> list[nn.Parameter]:
    """Return the parameters of the trainer's optimizer, which may not exist yet, and of optimizers in attributes."""
    if is_created(trainer.optimizer):
        optimized = optimized_parameters(trainer.optimizer)
    elif trainer.optimizer is None:
        optimized = []
    else:
        optimized = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    return [*optimized, *chain.from_iterable(map(optimized_parameters, other_optimizers(trainer).values()))]


def parameters_not_in_model(model: torch.nn.Module, optimizer: Optimizer) -> list[torch.nn.Parameter]:
    """Return the parameters of an optimizer that are not in the model, such as those of the loss function."""
    in_model = set(model.parameters())
    return [parameter for parameter in optimized_parameters(optimizer) if parameter not in in_model]


def updated_parameters(trainer: TrainerLike) -> list[torch.nn.Parameter]:
    """Return the parameters that an update changes: the optimizer's, and if it optimizes copies, also the model's."""
    optimized = optimized_parameters(trainer.optimizer)
    ids = set(map(id, optimized))
    has_model = any(id(parameter) in ids for parameter in trainer.model.parameters())
    if has_model or trainer.current_run.training_step.updates_one_by_one:  # the optimizer may be for another module
        return optimized
    return [*trainer.model.parameters(), *optimized]


def weights_are_finite(trainer: TrainerLike) -> bool:
    """Whether all trained parameters are finite and no buffer is NaN, on any process. Reads from the device.

    Call it on every process.
    """

    def largest(tensors: Iterable[torch.Tensor]) -> float:
        """Return the largest absolute value, or NaN if there is a NaN."""
        shards = [local_shard(t) for t in tensors if t.is_floating_point() and t.itemsize > 1]
        shards = [t.coalesce().values() if t.is_sparse else t for t in shards if t.numel()]  # for torch before 2.7
        if len({(t.device, t.dtype) for t in shards}) > 1:
            return torch.nn.utils.get_total_norm(shards, norm_type=math.inf).item()
        with torch.no_grad():  # with the same result, but without sorting by device and type
            return torch.stack(torch._foreach_norm(shards, math.inf)).max().item() if shards else 0.0

    model_parameters = trainer.model.parameters() if trainer.is_sharded else ()
    finite = math.isfinite(largest([*model_parameters, *all_optimized_parameters(trainer)]))
    finite = finite and not math.isnan(largest(trainer.model.buffers()))  # buffers may be infinite, as masks are
    return not trainer.ranks.max([float(not finite)])[0]


def set_optimizer_modes(trainer: TrainerLike, training: bool) -> None:
    """Set the mode of all optimizers that have modes."""
    if trainer.prepared_model is not None:
        trainer.prepared_model.trains = training
    for optimizer in (trainer.optimizer, *other_optimizers(trainer).values()):
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
