"""Modules, optimizers and schedulers in attributes of a trainer, trained or not, besides its own three."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol, TypeGuard, TypeVar

from torch import nn
from torch.optim import Optimizer

from pytorch_accel_lite.base.types import HasStateDict
from pytorch_accel_lite.optimizers.optimizer_types import SchedulerLike
from pytorch_accel_lite.run.run import TrainerLike

T = TypeVar("T")

_SAVED_SEPARATELY = ("model", "optimizer", "scheduler", "registered_objects")


class AttachedScheduler(SchedulerLike, Protocol):
    """A scheduler with an attribute for the optimizer that it changes."""

    optimizer: Optimizer


class ObjectsInAttributes(NamedTuple):
    """What ``other_modules()``, ``other_optimizers()`` and ``other_schedulers()`` return."""

    modules: dict[str, nn.Module]
    optimizers: dict[str, Optimizer]
    schedulers: dict[str, AttachedScheduler]


def find_objects(trainer: TrainerLike) -> ObjectsInAttributes:
    """Return the modules, the optimizers and the schedulers that are attributes."""
    return ObjectsInAttributes(other_modules(trainer), other_optimizers(trainer), other_schedulers(trainer))


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


def all_registered_objects(trainer: TrainerLike) -> dict[str, HasStateDict]:
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


def is_scheduler(value: object) -> TypeGuard[AttachedScheduler]:
    """Whether a value is a scheduler."""
    if isinstance(value, (nn.Module, Optimizer)):
        return False
    return all(hasattr(value, name) for name in ("optimizer", "step", "state_dict", "load_state_dict"))
