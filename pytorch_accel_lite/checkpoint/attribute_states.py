"""The states of trained objects other than the model: the loss function and the trainer's attributes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from pytorch_accel_lite.base.environment import warn_outside
from pytorch_accel_lite.base.paths import StrPath
from pytorch_accel_lite.base.protocols import TrainerLike
from pytorch_accel_lite.checkpoint.weights import fit_model_state, full_state_dict, load_optimizer_state, model_state
from pytorch_accel_lite.optimizers import attributes


def loss_state(trainer: TrainerLike) -> dict[str, torch.Tensor]:
    """Return the learned state of the loss function, by name: its trained parameters and its buffers.

    Excludes those of the model, and the constant buffers of torch's own losses, such as class weights.
    """
    return {name: value.detach() for name, value in _learned_by_loss(trainer).items()}


def buffers_beside_model(trainer: TrainerLike) -> list[tuple[nn.Module, str]]:
    """Return the buffers (running statistics, for example) of the loss function and of trained attributes.

    Each as its module and name, because a forward pass may assign another tensor.
    """
    modules = [owner for owner in attributes.trained(trainer).values() if isinstance(owner, nn.Module)]
    loss_buffers = attributes.buffers_in([trainer.loss_func]) if isinstance(trainer.loss_func, nn.Module) else []
    learned = set(map(id, _learned_by_loss(trainer).values()))
    loss_buffers = [(part, name) for part, name in loss_buffers if id(getattr(part, name)) in learned]
    return [*loss_buffers, *attributes.buffers_in(modules)]


def _learned_by_loss(trainer: TrainerLike) -> dict[str, torch.Tensor]:
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


def load_loss_state(trainer: TrainerLike, state: Mapping[str, Any], source: StrPath) -> None:
    """Restore the result of :func:`loss_state`; for a different loss function, restore what fits and warn."""
    loss_func = trainer.loss_func
    current = loss_func.state_dict() if isinstance(loss_func, nn.Module) else {}
    fitting = {name: value for name, value in state.items() if name in current and current[name].shape == value.shape}
    if fitting:
        loss_func.load_state_dict(fitting, strict=False)
    others = sorted(state.keys() - fitting.keys())
    if others and loss_func is not None:
        warn_outside(
            f"{os.fspath(source)!r} holds the state of a different loss function ({', '.join(others)}), which the "
            "trainer's loss function does not have. It is ignored."
        )


def _included(trainer: TrainerLike, optimizers: bool, schedulers: bool) -> dict[str, Any]:
    """Return the attributes that are saved with a trainer, by name, with or without optimizers and schedulers."""
    return {
        name: owner
        for name, owner in attributes.trained(trainer).items()
        if isinstance(owner, nn.Module) or (optimizers if isinstance(owner, torch.optim.Optimizer) else schedulers)
    }


def attribute_states(
    trainer: TrainerLike, keep: bool, optimizers: bool = True, schedulers: bool = True
) -> dict[str, Any]:
    """Return the states of the attributes that are saved with a trainer, by name. A collective if they are sharded.

    :param keep: ``False`` on processes that will not write them
    :param optimizers: whether to include optimizers
    :param schedulers: whether to include schedulers
    """
    return {
        name: model_state(owner, keep) if isinstance(owner, nn.Module) else full_state_dict(owner.state_dict(), keep)
        for name, owner in _included(trainer, optimizers, schedulers).items()
    }


def load_attribute_states(
    trainer: TrainerLike,
    states: Mapping[str, Any],
    source: StrPath,
    optimizers: bool = True,
    schedulers: bool = True,
    strict: bool = True,
    is_final: bool = False,
) -> None:
    """Restore the attributes from their states.

    :param strict: ``False`` to load only the weights that fit, and warn of the others
    :param is_final: whether to warn of mismatches between attributes and states, as no more attributes will be created
    :raises ValueError: if a state does not fit; names the attribute
    """
    if trainer.saves_attributes:
        load = partial(load_state, source=source, strict=strict)
        load_each("attribute", _included(trainer, optimizers, schedulers), states, load, is_final)


def load_state(name: str, owner: Any, state: Any, source: StrPath, strict: bool = True) -> None:
    """Load the state of a module, an optimizer or a scheduler.

    :raises ValueError: if it does not fit; names it
    """
    try:
        if isinstance(owner, nn.Module):
            owner.load_state_dict(fit_model_state(owner, state, source, strict), strict)
        elif name == "optimizer" or isinstance(owner, torch.optim.Optimizer):
            load_optimizer_state(owner, state)
        else:
            owner.load_state_dict(state)
    except (ValueError, KeyError) as error:
        raise ValueError(
            f"The {name} in {os.fspath(source)!r} does not fit the trainer's {type(owner).__name__}: {error}. Create "
            "it as it was when it was saved; saves_attributes = False in the trainer's class leaves out attributes."
        ) from error


def load_each(
    kind: str,
    owners: Mapping[str, Any],
    states: Mapping[str, Any],
    load: Callable[[str, Any, Any], None] = lambda name, owner, state: owner.load_state_dict(state),
    is_final: bool = True,
) -> None:
    """Restore all owners of a kind that have a state; finally, warn of owners without a state, and the reverse."""
    for name, owner in owners.items():
        if name in states:
            load(name, owner, states[name])
        elif is_final:
            warn_outside(f"The training state holds nothing for the {kind} {name!r}.")
    for name in states.keys() - owners.keys() if is_final else ():
        warn_outside(f"The training state holds the state of {kind} {name!r}, which no longer exists.")


def describe_attributes(trainer: TrainerLike) -> str:
    """Return a description of the attributes that training states hold; empty if there are none."""
    if not trainer.saves_attributes:
        return ""
    included = ", ".join(attributes.trained(trainer))
    excluded = ", ".join(attributes.untrained_modules(trainer))
    parts = [f"Training states include these attributes of the trainer: {included}."] if included else []
    if excluded:
        parts.append(
            f"{'They' if included else 'Training states'} do not include what no optimizer trains: {excluded}. If that "
            "changes during the run, include it with register_for_checkpointing()."
        )
    return " ".join(parts)
