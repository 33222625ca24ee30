"""What a trainer trains, and so saves, besides its model: objects in attributes, all optimizers, their parameters."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import NamedTuple, TypeGuard, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from pytorch_accel_lite.base.modules import local_shard
from pytorch_accel_lite.base.types import HasStateDict
from pytorch_accel_lite.optimizers.optimizer_parts import (
    TrainerOptimizer,
    is_created,
    optimized_parameters,
    single_optimizers,
)
from pytorch_accel_lite.optimizers.optimizer_steps import set_mode
from pytorch_accel_lite.run.events import TrainerCallback
from pytorch_accel_lite.run.run import TrainerLike

T = TypeVar("T")

_SAVED_SEPARATELY = ("model", "optimizer", "scheduler", "registered_objects")


def other_modules(trainer: TrainerLike) -> dict[str, nn.Module]:
    """Return the modules that are attributes, by name, including the loss function but not the model."""
    return instances_in(trainer, nn.Module)


def other_optimizers(trainer: TrainerLike) -> dict[str, Optimizer]:
    """Return the optimizers that are attributes, by name, except the trainer's ``optimizer`` and its parts."""
    own = _lists_of_groups(trainer.optimizer)
    attributes = instances_in(trainer, Optimizer)
    return {name: optimizer for name, optimizer in attributes.items() if not _lists_of_groups(optimizer) <= own}


def _lists_of_groups(optimizer: TrainerOptimizer) -> set[int]:
    """Return the ids of the lists of parameter groups of an optimizer's parts, which Accelerate's wrappers keep."""
    return {id(part.param_groups) for part in single_optimizers(optimizer).values()} if is_created(optimizer) else set()


def all_optimizers(trainer: TrainerLike) -> dict[str, Optimizer]:
    """Return the trainer's ``optimizer``, if it is created, and the optimizers that are attributes, by name."""
    own = {"optimizer": trainer.optimizer} if is_created(trainer.optimizer) else {}
    return own | other_optimizers(trainer)


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


def _is_scheduler(value: object) -> TypeGuard[HasStateDict]:
    """Whether a value is a scheduler."""
    if isinstance(value, (nn.Module, Optimizer)):
        return False
    return all(hasattr(value, name) for name in ("optimizer", "step", "state_dict", "load_state_dict"))


def all_optimized_parameters(trainer: TrainerLike) -> list[nn.Parameter]:
    """Return the parameters of the trainer's optimizer, which may not exist yet, and of optimizers in attributes."""
    created = [*chain.from_iterable(map(optimized_parameters, all_optimizers(trainer).values()))]
    if trainer.optimizer is None or is_created(trainer.optimizer):
        return created
    return [*(parameter for parameter in trainer.model.parameters() if parameter.requires_grad), *created]


def parameters_not_in_model(model: torch.nn.Module, optimizer: Optimizer) -> list[torch.nn.Parameter]:
    """Return the parameters of an optimizer that are not in the model, such as those of the loss function."""
    in_model = set(model.parameters())
    return [parameter for parameter in optimized_parameters(optimizer) if parameter not in in_model]


def updated_parameters(trainer: TrainerLike) -> list[torch.nn.Parameter]:
    """Return the parameters that an update changes: the optimizer's, and if it optimizes copies, also the model's."""
    optimized = optimized_parameters(trainer.optimizer)
    has_model = not set(optimized).isdisjoint(trainer.model.parameters())
    if has_model or trainer.current_run.training_step.updates_one_by_one:  # the optimizer may be for another module
        return optimized
    return [*trainer.model.parameters(), *optimized]


def weights_are_finite(trainer: TrainerLike) -> bool:
    """Whether all trained parameters are finite and no buffer is NaN, on any process. Reads from the device.

    Call it on every process.
    """

    def largest(tensors: Iterable[torch.Tensor]) -> float:
        """Return the largest absolute value, or NaN if there is a NaN."""
        shards = [local_shard(t) for t in tensors if t.dtype.is_complex or (t.is_floating_point() and t.itemsize > 1)]
        shards = [t.coalesce().values() if t.is_sparse else t for t in shards if t.numel()]  # for torch before 2.7
        if len({(t.device, t.dtype) for t in shards}) > 1:
            return torch.nn.utils.get_total_norm(shards, norm_type=math.inf).item()
        with torch.no_grad():  # with the same result, but without sorting by device and type
            return torch.stack(torch._foreach_norm(shards, math.inf)).max().item() if shards else 0.0

    model_parameters = trainer.model.parameters() if trainer.is_sharded else ()
    finite = math.isfinite(largest([*model_parameters, *all_optimized_parameters(trainer)]))
    finite = finite and not math.isnan(largest(trainer.model.buffers()))  # buffers may be infinite, as masks are
    return not trainer.ranks.max([float(not finite)])[0]


class SavedBeside(NamedTuple):
    """What is saved beside the model, the loss function, the optimizer and the scheduler, by name.

    Args:
        trained: the result of ``trained_objects()``
        loose: the result of ``loose_parameters()``
        registered: the result of ``all_registered_objects()``
    """

    trained: dict[str, HasStateDict]
    loose: dict[str, nn.Module | torch.Tensor]
    registered: dict[str, HasStateDict]


def unsaved_attribute_names(owner: TrainerLike | TrainerCallback) -> frozenset[str]:
    """Return the attributes of a trainer or a callback that its class keeps from being saved.

    Raises:
        TypeError: if ``unsaved_attributes`` does not consist of names
    """
    names = owner.unsaved_attributes
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"unsaved_attributes={names!r} of {type(owner).__name__} must be names of attributes, such as "
            "('cache', 'log')."
        )
    return frozenset(names)


def trained_objects(trainer: TrainerLike) -> dict[str, HasStateDict]:
    """Return the attributes that are saved with the trainer, by name: trained modules, optimizers and schedulers.

    Excludes attributes that are always saved: the model, the loss function and their parts, the optimizer, registered
    objects.
    """
    return _without_unsaved(trainer, _trained(trainer)) if trainer.saves_attributes else {}


def saved_optimizers(trainer: TrainerLike) -> dict[str, Optimizer]:
    """Return the optimizers in training states by name: the trainer's ``optimizer``, and optimizers in attributes."""
    named = {"optimizer": trainer.optimizer, **trained_objects(trainer)}
    return {name: owner for name, owner in named.items() if isinstance(owner, Optimizer)}


def _without_unsaved(trainer: TrainerLike, values: dict[str, T]) -> dict[str, T]:
    """Leave out the attributes in ``unsaved_attributes``, with their parts, such as ``critics.0``."""
    left_out = unsaved_attribute_names(trainer)
    return {name: value for name, value in values.items() if name.partition(".")[0] not in left_out}


def _trained(trainer: TrainerLike) -> dict[str, HasStateDict]:
    """Return the objects in attributes that are trained, in ``unsaved_attributes`` or not."""
    modules = other_modules(trainer)
    steppers: dict[str, HasStateDict] = {**other_optimizers(trainer), **_find(trainer, _is_scheduler)}
    if not steppers and all(module is trainer.loss_func for module in modules.values()):  # usual, and fast
        return {}
    optimized = set(map(id, all_optimized_parameters(trainer)))
    saved = set(map(id, [*all_registered_objects(trainer).values(), trainer.loss_func, trainer.scheduler]))
    seen = {id(parameter) for module in (trainer.model, trainer.loss_func) for parameter in _parameters_in(module)}
    attributes: dict[str, HasStateDict] = {}
    for name, module in modules.items():
        parameters = set(map(id, _parameters_in(module))) - seen
        if id(module) not in saved and parameters & optimized:
            attributes[name] = module
            seen |= parameters
    return attributes | {name: value for name, value in steppers.items() if id(value) not in saved}


def loose_parameters(trainer: TrainerLike) -> dict[str, nn.Module | torch.Tensor]:
    """Return the parameters that the optimizers train outside the model and all other saved modules.

    Parameters that are attributes of the trainer are named after the attribute. Others, in closures for example, are
    named by their first place in an optimizer, such as ``optimizer[0][3]``. A module that holds such parameters is
    returned in their place, because it may have buffers, too.
    """
    return find_saved_beside(trainer).loose


def find_saved_beside(trainer: TrainerLike) -> SavedBeside:
    """Return what is saved beside the model."""
    registered = all_registered_objects(trainer)
    trained: dict[str, HasStateDict] = {}
    loose: dict[str, nn.Module | torch.Tensor] = {}
    if trainer.saves_attributes:
        trained = _trained(trainer)
        places = _places(trainer, [*trained.values(), *registered.values()])
        loose = _owners(trainer, places) if places else {}
    return SavedBeside(_without_unsaved(trainer, trained), _without_unsaved(trainer, loose), registered)


def _owners(trainer: TrainerLike, places: dict[str, torch.Tensor]) -> dict[str, nn.Module | torch.Tensor]:
    """Return loose parameters, given by their places in optimizers, or the modules that hold them."""
    found: dict[str, nn.Module | torch.Tensor] = {}
    own = {id(value): name for name, value in instances_in(trainer, torch.Tensor).items()}
    holders = _holders(trainer, frozenset({id(p) for p in places.values()} - own.keys()))
    covered: set[int] = set()
    for place, parameter in places.items():
        if id(parameter) not in covered:
            owner = parameter if id(parameter) in own else holders.get(id(parameter), parameter)
            found[own.get(id(parameter), place)] = owner
            covered |= _ids(owner) | {id(parameter)}
    return found


def _places(trainer: TrainerLike, others: list[HasStateDict]) -> dict[str, torch.Tensor]:
    """Return the optimized parameters outside the model and other saved objects, by their place in an optimizer."""
    saved = [trainer.model, trainer.loss_func, *others]
    named = {id(parameter) for owner in saved for parameter in _parameters_in(owner)}
    return {
        f"{name}[{number}][{index}]": parameter
        for name, optimizer in all_optimizers(trainer).items()
        for number, group in enumerate(optimizer.param_groups)
        for index, parameter in enumerate(group["params"])
        if id(parameter) not in named
    }


def _holders(trainer: TrainerLike, parameters: frozenset[int]) -> dict[int, nn.Module]:
    """Return, by parameter id, the largest modules whose trainable parameters are all among these parameters.

    The modules may be anywhere in the program, such as in a closure or a global. The garbage collector finds them, once
    in a run.
    """
    known: dict[frozenset[int], dict[int, nn.Module]] = trainer.current_run.holders
    if parameters not in known:
        known[parameters] = _find_holders(parameters, _ids(trainer.model)) if parameters else {}
    return known[parameters]


def _find_holders(parameters: frozenset[int], in_model: set[int]) -> dict[int, nn.Module]:
    holders: dict[int, nn.Module] = {}
    sizes: dict[int, int] = {}
    for module in gc.get_objects():
        if not issubclass(type(module), nn.Module) or "_parameters" not in vars(module):
            continue
        held = _ids(module)
        trainable = {id(parameter) for parameter in _parameters_in(module) if parameter.requires_grad}
        if held & parameters and trainable <= parameters and not held & in_model:
            for parameter in held & parameters:
                size = sizes.get(parameter, -1)
                if len(held) > size or (len(held) == size and _is_around(module, holders[parameter])):
                    holders[parameter], sizes[parameter] = module, len(held)
    return holders


def _is_around(module: nn.Module, other: nn.Module) -> bool:
    """Whether a module wraps another with the same parameters, as ``DistributedDataParallel`` does."""
    if any(part is other for part in module.modules()):
        return True
    contained = any(part is module for part in other.modules())
    return not contained and type(module).__qualname__ < type(other).__qualname__


def _ids(owner: object) -> set[int]:
    return set(map(id, _parameters_in(owner)))


def _parameters_in(owner: object) -> list[nn.Parameter]:
    """Return the parameters of a module; none of anything else."""
    return list(owner.parameters()) if isinstance(owner, nn.Module) else []


def buffers_beside_model(trainer: TrainerLike) -> list[tuple[nn.Module, str]]:
    """Return the buffers (running statistics, for example) of the loss function and of trained attributes.

    Each buffer is given by its module and name, because a forward pass may assign another tensor.
    """
    beside = find_saved_beside(trainer)
    owners = [*beside.trained.values(), *beside.loose.values()]
    modules = [owner for owner in owners if isinstance(owner, nn.Module)]
    loss_buffers = buffers_in([trainer.loss_func]) if isinstance(trainer.loss_func, nn.Module) else []
    learned = set(map(id, learned_by_loss(trainer).values()))
    loss_buffers = [(part, name) for part, name in loss_buffers if id(getattr(part, name)) in learned]
    return [*loss_buffers, *buffers_in(modules)]


def learned_by_loss(trainer: TrainerLike) -> dict[str, torch.Tensor]:
    """Return what the loss function learns, by name: its parameters and buffers, except constants and the model's."""
    loss_func = trainer.loss_func
    if not isinstance(loss_func, nn.Module):
        return {}
    model = trainer.get_model()
    torch_losses = [module for module in loss_func.modules() if type(module).__module__ == nn.modules.loss.__name__]
    others = chain(model.parameters(), model.buffers(), *(module.buffers() for module in torch_losses))
    excluded = set(map(id, others))
    return {
        name: value
        for name, value in loss_func.state_dict(keep_vars=True).items()
        if isinstance(value, torch.Tensor)
        and id(value) not in excluded
        and (value.requires_grad or not isinstance(value, nn.Parameter))
    }


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
