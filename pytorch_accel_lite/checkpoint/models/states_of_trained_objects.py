"""Capturing and restoring the states of what is trained beside the model, which ``trained_objects.py`` finds."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter, is_lazy

from pytorch_accel_lite.base.paths import StrPath
from pytorch_accel_lite.base.types import HasStateDict, StateDict, Tree
from pytorch_accel_lite.base.warnings_and_errors import add_note, warn_outside
from pytorch_accel_lite.checkpoint.models.optimizer_state_loading import load_optimizer_state
from pytorch_accel_lite.checkpoint.models.trainability import lacks_groups
from pytorch_accel_lite.checkpoint.models.weights import fit_model_state, full_state_dict, model_state, sharded_like
from pytorch_accel_lite.optimizers.optimizer_parts import is_created
from pytorch_accel_lite.optimizers.scheduled_options import note_options, noted_options
from pytorch_accel_lite.optimizers.types_of_states import load_state_of
from pytorch_accel_lite.run.run import TrainerLike
from pytorch_accel_lite.run.trained_objects import (
    instances_in,
    learned_by_loss,
    loose_parameters,
    other_modules,
    trained_objects,
)

#: An object that is saved with a trainer. The state of a tensor is the tensor itself.
Owner: TypeAlias = HasStateDict | torch.Tensor


def loss_state(trainer: TrainerLike) -> dict[str, torch.Tensor]:
    """Return the learned state of the loss function, by name: its trained parameters and its buffers.

    Excludes everything in the model, and the constant buffers of torch's own losses, such as class weights.
    """
    return {name: value.detach() for name, value in learned_by_loss(trainer).items()}


def load_loss_state(trainer: TrainerLike, state: StateDict, source: StrPath) -> None:
    """Restore the result of ``loss_state()``. For a different loss function, restore the parts that fit, and warn."""
    loss_func = trainer.loss_func
    current = loss_func.state_dict() if isinstance(loss_func, nn.Module) else {}
    fitting = {
        name: value
        for name, value in state.items()
        if name in current and (is_lazy(current[name]) or current[name].shape == value.shape)
    }
    if isinstance(loss_func, nn.Module) and fitting:
        # Load the whole state: hooks of parts, such as gpytorch's, assume that each part has a state.
        whole = {name: value for name, value in current.items() if not is_lazy(value)} | fitting
        loss_func.load_state_dict(whole, strict=False)
    if loss_func is None:
        return
    others = sorted(state.keys() - fitting.keys())
    if missing := [name for name in others if name not in current]:
        warn_outside(
            f"{os.fspath(source)!r} holds the state of a different loss function ({', '.join(missing)}), which the "
            "trainer's loss function does not have. It is ignored."
        )
    if shapes := [
        f"{name} {tuple(state[name].shape)}, here {tuple(current[name].shape)}" for name in others if name in current
    ]:
        warn_outside(
            f"{os.fspath(source)!r} holds parts of the loss function in another shape: {'; '.join(shapes)}. They are "
            "ignored. To load them, create the loss function as it was when it was saved."
        )


def names_beside_model(trainer: TrainerLike) -> list[str]:
    """Return the names of all that is trained besides the model: the loss function, attributes, other places."""
    parts = [name for name, owner in trained_objects(trainer).items() if isinstance(owner, nn.Module)]
    learned = ["the loss function"] if loss_state(trainer) else []
    return [*learned, *parts, *loose_parameters(trainer)]


def _included(trainer: TrainerLike, optimizers: bool, schedulers: bool) -> dict[str, Owner]:
    """Return the attributes that are saved with a trainer, by name, with or without optimizers and schedulers."""
    return {
        name: owner
        for name, owner in (trained_objects(trainer) | loose_parameters(trainer)).items()
        if isinstance(owner, (nn.Module, torch.Tensor))
        or (optimizers if isinstance(owner, torch.optim.Optimizer) else schedulers)
    }


def trained_object_states(
    trainer: TrainerLike,
    keep: bool,
    optimizers: bool = True,
    schedulers: bool = True,
    others: Mapping[str, nn.Module] | None = None,
) -> dict[str, Tree]:
    """Return the states of the attributes that are saved with a trainer, by name. A collective if they are sharded.

    Args:
        keep: ``False`` on processes that will not write the states
        optimizers: whether to include optimizers
        schedulers: whether to include schedulers
        others: further modules to include, by attribute
    """
    included = _included(trainer, optimizers, schedulers) | dict(others or {})
    return {name: _state_of(owner, keep) for name, owner in included.items()}


def _state_of(owner: Owner, keep: bool) -> Tree:
    if isinstance(owner, nn.Module):
        return model_state(owner, keep)
    return full_state_dict(owner.detach() if isinstance(owner, torch.Tensor) else owner.state_dict(), keep)


@contextmanager
def undone_on_error(trainer: TrainerLike, optimizers: bool, schedulers: bool) -> Iterator[None]:
    """Give optimizers and schedulers the states back that they had before this block, if it raises an error.

    Loading replaces their tensors, so nothing is copied. What else is loaded in the block comes last, once it fits.
    """
    main = [trainer.optimizer if optimizers else None, trainer.scheduler if schedulers else None]
    before = [
        (owner, owner.state_dict(), noted_options(owner) if is_created(owner) else None)
        for owner in (*main, *_included(trainer, optimizers, schedulers).values())
        if owner is not None and not isinstance(owner, (nn.Module, torch.Tensor))
    ]
    try:
        yield
    except BaseException:
        for owner, state, noted in reversed(before):
            load_state_of(owner, state)
            if noted is not None:
                note_options(owner, noted)
        raise


def fit_trained_object_states(
    trainer: TrainerLike,
    states: Mapping[str, Tree],
    source: StrPath,
    optimizers: bool = True,
    schedulers: bool = True,
    strict: bool = True,
    is_final: bool = False,
) -> list[Callable[[], object]]:
    """Return functions that restore the attributes from their states, without changing any.

    Args:
        strict: ``False`` to load only the weights that fit, and to warn of the others
        is_final: whether no more attributes will be created, so that mismatches with states are worth a warning

    Returns:
        first those of optimizers and schedulers, which may still raise a ``ValueError``; those of weights do not

    Raises:
        ValueError: if weights do not fit; names the attribute
    """
    if not trainer.saves_attributes:
        return []
    included = _included(trainer, optimizers, schedulers)
    included |= {name: module for name, module in other_modules(trainer).items() if name in states}
    if optimizers:  # earlier versions saved the parts of the trainer's optimizer that are attributes, too
        parts = instances_in(trainer, torch.optim.Optimizer)
        included |= {name: part for name, part in parts.items() if name in states}
    if not is_final:  # the starting events may still add groups to optimizers
        included = {name: owner for name, owner in included.items() if not lacks_groups(owner, states.get(name, {}))}
    weights_last = dict(sorted(included.items(), key=lambda item: isinstance(item[1], (nn.Module, torch.Tensor))))
    loads: list[Callable[[], object]] = []

    def fit(name: str, owner: Owner, state: Tree) -> None:
        loads.append(_fit_state(name, owner, state, source, strict))

    load_each("attribute", weights_last, states, fit, is_final)
    return loads


def load_state(name: str, owner: Owner, state: Tree, source: StrPath) -> None:
    """Load the state of a module, an optimizer or a scheduler.

    Raises:
        ValueError: if the state does not fit; names the object
    """
    _fit_state(name, owner, state, source)()


def _fit_state(name: str, owner: Owner, state: Tree, source: StrPath, strict: bool = True) -> Callable[[], object]:
    """Return a function that loads the state of a module, an optimizer or a scheduler.

    Raises:
        ValueError: if weights do not fit; names the object. The function raises it for an optimizer or a scheduler.
    """
    with _naming_owner(name, owner, source):
        load: Callable[[], object]
        if isinstance(owner, nn.Module):
            load = partial(owner.load_state_dict, fit_model_state(owner, state, source, strict), strict)
        elif isinstance(owner, torch.Tensor):
            load = _fit_tensor(owner, state)
        elif name == "optimizer" or isinstance(owner, torch.optim.Optimizer):
            load = partial(load_optimizer_state, owner, state)
        else:
            load = partial(owner.load_state_dict, state)
    return _naming_owner(name, owner, source)(load)


@contextmanager
def _naming_owner(name: str, owner: Owner, source: StrPath) -> Iterator[None]:
    """Name the object whose state does not fit in the errors of a block, or of a function that this decorates."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"The {name} in {os.fspath(source)!r} does not fit the trainer's {type(owner).__name__}: {error}. Create "
            "it as it was when it was saved; saves_attributes = False in the trainer's class leaves out attributes."
        ) from error


def _fit_tensor(tensor: torch.Tensor, saved: torch.Tensor) -> Callable[[], None]:
    if not isinstance(tensor, UninitializedParameter) and tensor.shape != saved.shape:
        raise ValueError(f"it has the shape {tuple(saved.shape)} there, and {tuple(tensor.shape)} here")

    def load() -> None:
        if isinstance(tensor, UninitializedParameter):
            tensor.materialize(saved.shape)
        with torch.no_grad():
            tensor.copy_(sharded_like(tensor, saved))

    return load


def load_each(
    kind: str,
    owners: Mapping[str, Any],
    states: Mapping[str, Tree],
    load: Callable[[str, Any, Tree], object] = lambda name, owner, state: owner.load_state_dict(state),
    is_final: bool = True,
) -> None:
    """Restore all owners of a kind from their states. If final, warn of owners without states, and the reverse."""
    for name, owner in owners.items():
        if name in states:
            try:
                load(name, owner, states[name])
            except Exception as error:
                add_note(error, f"In loading the state of the {kind} {name!r}.")
                raise
        elif is_final:
            warn_outside(f"The training state holds nothing for the {kind} {name!r}.")
    for name in states.keys() - owners.keys() if is_final else ():
        if states[name] != {}:  # an empty state is no loss
            warn_outside(f"The training state holds the state of {kind} {name!r}, which no longer exists.")


def describe_attributes(trainer: TrainerLike) -> str:
    """Return a description of what training states hold besides the model; an empty text if that is nothing."""
    named, hidden = ", ".join(trained_objects(trainer)), loose_parameters(trainer)
    parts = [f"Training states include these attributes of the trainer: {named}."] if named else []
    if hidden:
        parts.append(
            f"{'They also' if named else 'Training states'} include what the optimizer trains outside of the model: "
            f"{', '.join(f'{name} ({_describe_owner(owner)})' for name, owner in hidden.items())}."
        )
    return " ".join(parts)


def _describe_owner(owner: nn.Module | torch.Tensor) -> str:
    return type(owner).__name__ if isinstance(owner, nn.Module) else f"shape {tuple(owner.shape)}"
