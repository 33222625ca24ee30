"""Which objects a trainer trains, and so saves, besides its model and optimizer.

These are the loss function, modules, optimizers and schedulers in its attributes, and loose parameters, which no such
module has.
"""

from __future__ import annotations

import gc
from typing import NamedTuple, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from pytorch_accel_lite.base.types import HasStateDict
from pytorch_accel_lite.optimizers.optimizer_parts import is_created
from pytorch_accel_lite.run.events import TrainerCallback
from pytorch_accel_lite.run.run import TrainerLike
from pytorch_accel_lite.run.trainer_parts.objects_in_attributes import (
    ObjectsInAttributes,
    all_registered_objects,
    buffers_in,
    find_objects,
    instances_in,
)
from pytorch_accel_lite.run.trainer_parts.parameters_of_optimizers import all_optimized_parameters

T = TypeVar("T")


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
    trained = _trained(trainer, find_objects(trainer)) if trainer.saves_attributes else {}
    return _without_unsaved(trainer, trained)


def saved_optimizers(trainer: TrainerLike) -> dict[str, Optimizer]:
    """Return the optimizers in training states by name: the trainer's ``optimizer``, and optimizers in attributes."""
    named = {"optimizer": trainer.optimizer, **trained_objects(trainer)}
    return {name: owner for name, owner in named.items() if isinstance(owner, Optimizer)}


def _without_unsaved(trainer: TrainerLike, values: dict[str, T]) -> dict[str, T]:
    """Leave out the attributes in ``unsaved_attributes``, with their parts, such as ``critics.0``."""
    left_out = unsaved_attribute_names(trainer)
    return {name: value for name, value in values.items() if name.partition(".")[0] not in left_out}


def _trained(trainer: TrainerLike, objects: ObjectsInAttributes) -> dict[str, HasStateDict]:
    """Return the objects in attributes that are trained, in ``unsaved_attributes`` or not."""
    modules, optimizers, schedulers = objects
    others = [module for module in modules.values() if module is not trainer.loss_func]
    if not others and not schedulers and not optimizers:  # the usual case, which is fast
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
    attributes |= {name: value for name, value in optimizers.items() if id(value) not in saved}
    return attributes | {name: value for name, value in schedulers.items() if id(value) not in saved}


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
        objects = find_objects(trainer)
        trained = _trained(trainer, objects)
        places = _places(trainer, [*trained.values(), *registered.values()], objects.optimizers)
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


def _places(
    trainer: TrainerLike, others: list[HasStateDict], optimizers: dict[str, Optimizer]
) -> dict[str, torch.Tensor]:
    """Return the optimized parameters outside the model and other saved objects, by their place in an optimizer."""
    groups = {} if not is_created(trainer.optimizer) else {"optimizer": trainer.optimizer}
    groups |= optimizers
    saved = [trainer.model, trainer.loss_func, *others]
    named = {id(parameter) for owner in saved for parameter in _parameters_in(owner)}
    return {
        f"{name}[{number}][{index}]": parameter
        for name, optimizer in groups.items()
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
    others = [
        *model.parameters(),
        *model.buffers(),
        *(buffer for module in torch_losses for buffer in module.buffers()),
    ]
    excluded = set(map(id, others))
    return {
        name: value
        for name, value in loss_func.state_dict(keep_vars=True).items()
        if isinstance(value, torch.Tensor)
        and id(value) not in excluded
        and (value.requires_grad or not isinstance(value, nn.Parameter))
    }
