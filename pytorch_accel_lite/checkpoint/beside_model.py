"""The states of what is trained besides the model: the loss function and the trainer's attributes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from pytorch_accel_lite.base.protocols import TrainerLike
from pytorch_accel_lite.checkpoint.files import StrPath
from pytorch_accel_lite.checkpoint.weights import fit_model_state, full_state_dict, load_optimizer_state, model_state
from pytorch_accel_lite.optimizers import attributes


def loss_state(trainer: TrainerLike) -> dict[str, torch.Tensor]:
    """Return what the loss function has learned, by name: its trained parameters and its buffers.

    Excludes those of the model, and the constant buffers of torch's own losses, such as class weights.
    """
    return {name: value.detach() for name, value in _learned_by_loss(trainer).items()}


def buffers_beside_model(trainer: TrainerLike) -> list[tuple[nn.Module, str]]:
    """Return the buffers (running statistics, for example) of the loss function and of trained attributes.

    Each by its module and name, because a forward pass may assign another tensor.
    """
    modules = [owner for owner in attributes.trained(trainer).values() if isinstance(owner, nn.Module)]
    of_loss = attributes.buffers_in([trainer.loss_func]) if isinstance(trainer.loss_func, nn.Module) else []
    learned = set(map(id, _learned_by_loss(trainer).values()))
    return [
        *((part, name) for part, name in of_loss if id(getattr(part, name)) in learned),
        *attributes.buffers_in(modules),
    ]


def _learned_by_loss(trainer: TrainerLike) -> dict[str, torch.Tensor]:
    loss_func = trainer.loss_func
    if not isinstance(loss_func, nn.Module):
        return {}
    model = trainer.get_model()
    given = [module for module in loss_func.modules() if type(module).__module__ == nn.modules.loss.__name__]
    others = [*model.parameters(), *model.buffers(), *(buffer for module in given for buffer in module.buffers())]
    left_out = set(map(id, others))
    return {
        name: value
        for name, value in loss_func.state_dict(keep_vars=True).items()
        if isinstance(value, torch.Tensor)
        and id(value) not in left_out
        and (value.requires_grad or not isinstance(value, nn.Parameter))
    }


def load_loss_state(trainer: TrainerLike, state: Mapping[str, Any], source: StrPath) -> None:
    """Restore the result of :func:`loss_state`; for a different loss function, restore what fits and warn."""
    loss_func = trainer.loss_func
    own = loss_func.state_dict() if isinstance(loss_func, nn.Module) else {}
    fitting = {name: value for name, value in state.items() if name in own and own[name].shape == value.shape}
    if isinstance(loss_func, nn.Module) and fitting:
        loss_func.load_state_dict(fitting, strict=False)
    others = sorted(state.keys() - fitting.keys())
    if others and loss_func is not None:
        warnings.warn(
            f"{os.fspath(source)!r} holds the state of a different loss function ({', '.join(others)}), which the "
            "trainer's loss function does not have. It is ignored.",
            stacklevel=3,
        )


def attribute_states(
    trainer: TrainerLike, keep: bool, optimizers: bool = True, schedulers: bool = True
) -> dict[str, Any]:
    """Return the states of the attributes that are saved with a trainer, by name. A collective if they are sharded.

    :param keep: ``False`` on processes that will not write them
    :param optimizers: whether to include optimizers
    :param schedulers: whether to include schedulers
    """
    states: dict[str, Any] = {}
    for name, owner in attributes.trained(trainer).items():
        if isinstance(owner, nn.Module):
            states[name] = model_state(owner, keep)
        elif optimizers if isinstance(owner, torch.optim.Optimizer) else schedulers:
            states[name] = full_state_dict(owner.state_dict(), keep)
    return states


def load_attribute_state(owner: Any, name: str, state: Mapping[str, Any], source: StrPath, strict: bool = True) -> None:
    """Restore the state of an attribute.

    :raises ValueError: if it does not fit; names the attribute
    """
    try:
        if isinstance(owner, nn.Module):
            owner.load_state_dict(fit_model_state(owner, state, source, strict), strict)
        elif isinstance(owner, torch.optim.Optimizer):
            load_optimizer_state(owner, state)
        else:
            owner.load_state_dict(state)
    except (ValueError, KeyError) as error:
        raise ValueError(
            f"{name} of the trainer does not fit its saved state: {error} Create it as it was when it was saved, or "
            "set saves_attributes = False in your Trainer to neither save nor restore its attributes."
        ) from error


def load_attribute_states(trainer: TrainerLike, states: Mapping[str, Any], source: StrPath, is_final: bool) -> None:
    """Restore the attributes that a training state holds.

    :param is_final: whether to warn of mismatches between attributes and states, as no more attributes will be created
    """
    if not trainer.saves_attributes:
        return
    owners = attributes.trained(trainer)
    for name in owners.keys() & states.keys():
        load_attribute_state(owners[name], name, states[name], source)
    for name in owners.keys() - states.keys() if is_final else ():
        warnings.warn(f"The training state holds nothing for the trainer's attribute {name!r}.", stacklevel=3)
    for name in states.keys() - owners.keys() if is_final else ():
        warnings.warn(
            f"The training state holds the state of attribute {name!r}, which no longer exists.", stacklevel=3
        )


def describe_attributes(trainer: TrainerLike) -> str:
    """Return a description of the attributes that training states hold; empty if there are none."""
    if not trainer.saves_attributes:
        return ""
    held = ", ".join(attributes.trained(trainer))
    left_out = ", ".join(attributes.untrained(trainer))
    parts = [f"Training states include these attributes of the trainer: {held}."] if held else []
    if left_out:
        parts.append(
            f"{'They' if held else 'Training states'} do not include what no optimizer trains: {left_out}. If that "
            "changes during the run, include it with register_for_checkpointing()."
        )
    return " ".join(parts)
