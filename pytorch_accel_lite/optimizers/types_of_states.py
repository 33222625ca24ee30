"""The states of optimizers, loaded to the same bits: each entry keeps the type that it was saved with."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from pytorch_accel_lite.base.types import HasStateDict, StateDict, Tree
from pytorch_accel_lite.optimizers.optimizer_parts import optimized_parameters, single_optimizers, without_wrappers


def load_state_of(owner: HasStateDict, state: StateDict) -> None:
    """Load the state of an object, which may be an optimizer."""
    if isinstance(owner, Optimizer):
        load_keeping_types(owner, state)
    else:
        owner.load_state_dict(state)


def load_keeping_types(optimizer: Optimizer, state: StateDict) -> None:
    """Load a state, and restore what ``Optimizer.load_state_dict`` converts or replaces.

    It replaces the parameter groups, which callbacks and users' schedulers may hold: they keep their identity here. And
    in states of other libraries' algorithms, it converts values.

    It gives all tensors the type of the parameter, such as bfloat16, even masks and weights in float32, and takes a
    text for a list. States of torch's algorithms have the parameter's type, also if it is another one than when they
    were saved. A class that loads states itself is left alone: its states may have a form of their own.
    """
    parts = [without_wrappers(part) for part in single_optimizers(optimizer).values()]
    groups_before = [part.param_groups for part in parts]
    optimizer.load_state_dict(state)
    for part, groups in zip(parts, groups_before, strict=True):
        if type(part).load_state_dict is Optimizer.load_state_dict:
            _put_into(groups, part)
    values_of = state.get("state", {})
    saved = iter([values_of.get(number) for group in state.get("param_groups", ()) for number in group["params"]])
    for part in parts:
        kind = type(part)
        is_left = kind.load_state_dict is not Optimizer.load_state_dict or kind.step.__module__.startswith(
            "torch.optim."
        )
        for parameter in optimized_parameters(part):
            values = next(saved, None)
            if values and not is_left and parameter in part.state:
                part.state[parameter] = _with_types_of(values, part.state[parameter])


def _put_into(groups: list[StateDict], loaded: Optimizer) -> None:
    """Put the parameter groups that an optimizer has loaded into those that it had before."""
    for group, new in zip(groups, loaded.param_groups, strict=True):
        if group is not new:
            group.clear()
            group.update(new)
    loaded.param_groups = groups


def _with_types_of(saved: Tree, loaded: Tree) -> Tree:
    """Return loaded values, with the saved ones in place of those that have another type."""
    if isinstance(saved, torch.Tensor) and isinstance(loaded, torch.Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device)
    if isinstance(saved, str):
        return saved
    if isinstance(saved, dict) and isinstance(loaded, dict):
        return {key: _with_types_of(saved[key], value) if key in saved else value for key, value in loaded.items()}
    if type(saved) in (list, tuple) and type(loaded) is type(saved) and len(loaded) == len(saved):
        return type(saved)(map(_with_types_of, saved, loaded))
    return loaded
