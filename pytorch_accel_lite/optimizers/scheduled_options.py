"""The options of parameter groups that schedules change, such as the rate: setting them, and their initial values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from copy import deepcopy
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer

from pytorch_accel_lite.base.nested_values import to_number
from pytorch_accel_lite.optimizers.optimizer_parts import TrainerOptimizer, unwrapped_parts

# Options that torch's schedules change in parameter groups. Schedulers store initial values there, as "initial_lr".
_SCHEDULED = ("lr", "momentum", "betas")
_INITIAL = "initial_"

#: Values of options, such as those that schedules change, by name, for each parameter group.
Options: TypeAlias = list[dict[str, Any]]
#: A parameter group of an optimizer: its parameters and options, by name.
ParamGroup: TypeAlias = dict[str, Any]
#: A learning rate as a number; ``None`` for a group without one.
Rate: TypeAlias = float | None
#: The options of optimizers that a schedule or a file has set last.
_noted_options: WeakKeyDictionary[Optimizer, Options] = WeakKeyDictionary()


def set_option(group: ParamGroup, name: str, value: object) -> None:
    """Set an option of a parameter group."""
    if isinstance(group[name], torch.Tensor):
        group[name].fill_(value)  # compiled optimizers keep a reference to the tensor
    else:
        group[name] = value


def scheduled_options(optimizer: Optimizer) -> Options:
    """Return the current values of the options that schedules change, or have changed."""
    return [
        {name: to_number(group[name]) for name in (*_SCHEDULED, *names_of_initial(group)) if name in group}
        for group in optimizer.param_groups
    ]


def names_of_initial(group: ParamGroup) -> list[str]:
    """Return the names of the options whose initial values a parameter group has."""
    names = (key.removeprefix(_INITIAL) for key in group if key.startswith(_INITIAL))
    return [name for name in names if name in group]  # unlike Adagrad's initial_accumulator_value


def set_options(optimizer: Optimizer, options: Options) -> None:
    """Set options of each parameter group."""
    for group, values in zip(optimizer.param_groups, options, strict=True):
        for name, value in values.items():
            set_option(group, name, value)


def all_options(optimizer: TrainerOptimizer) -> Options:
    """Return a copy of the options of each parameter group, but for objects that may be large or cannot be copied."""
    groups = getattr(optimizer, "param_groups", ())  # there are none without an optimizer
    return [
        {name: deepcopy(value) for name, value in group.items() if name != "params" and _is_plain(value)}
        for group in groups
    ]


def _is_plain(option: object) -> bool:
    """Whether an option is a number, a text, a tensor without gradients, or a list or dict of these."""
    if isinstance(option, (list, tuple)):
        return all(map(_is_plain, option))
    if isinstance(option, dict):
        return all(map(_is_plain, option.values()))
    if isinstance(option, torch.Tensor):
        return not option.requires_grad
    return option is None or isinstance(option, (bool, int, float, complex, str))


def initial_options(optimizer: Optimizer, noted: Options | None = None) -> Options:
    """Return the values that the options had before any schedule changed them.

    Args:
        noted: the options from ``noted_options()``. An option that differs from these was set by the user, and counts
            as an initial value.
    """
    options = scheduled_options(optimizer)
    for group, values, before in zip(optimizer.param_groups, options, noted or [{}] * len(options), strict=True):
        for name, value in values.items():
            if before.get(name, value) == value:
                values[name] = to_number(group.get(f"{_INITIAL}{name}", value))
    return options


def note_options(optimizer: Optimizer, options: Options | None = None) -> None:
    """Note the options that a schedule or a file has set: other values in this optimizer are set by the user.

    Args:
        options: earlier ``noted_options()``, to note them again; by default, the current ones
    """
    noted = iter(scheduled_options(optimizer) if options is None else options)
    for part in unwrapped_parts(optimizer):
        of_part = [next(noted) for _ in part.param_groups]
        with suppress(TypeError):  # a class of another library may have no hash, or no weak references
            _noted_options[part] = of_part


def noted_options(optimizer: Optimizer) -> Options:
    """Return the options from ``note_options()``, whichever trainer called it; if none did, the current ones."""
    noted: Options = []
    for part in unwrapped_parts(optimizer):
        options, known = scheduled_options(part), []
        with suppress(TypeError):
            known = _noted_options.get(part, [])[: len(options)]
        noted += known + options[len(known) :]  # groups may have been added
    return noted


def note_initial_options(optimizer: Optimizer, initial: Options) -> None:
    """Store the initial values in the optimizer, as torch does: ``OneCycleLR`` sets a different ``initial_lr``."""
    for group, values in zip(optimizer.param_groups, initial, strict=False):  # groups may have been added
        for name, value in values.items():
            if name == "lr" or to_number(group[name]) != value:
                group[f"{_INITIAL}{name}"] = value
            else:
                group.pop(f"{_INITIAL}{name}", None)


def layer_scales(groups: Sequence[ParamGroup], rates: Sequence[Rate]) -> list[float]:
    """Return the factor of a schedule for each group's rate: its ``lr_scale``, as in timm's schedulers.

    ``timm.optim.param_groups_layer_decay`` gives groups this key and one rate for all. Rates that already have these
    proportions were multiplied by the user, so their factor is 1.

    Args:
        rates: the rates of the groups before any schedule
    """
    scales = [float(group.get("lr_scale", 1.0)) for group in groups]
    base = next((rate / scale for rate, scale in zip(rates, scales, strict=True) if rate and scale), 0.0)
    are_in_proportion = len(set(scales)) > 1 and all(
        rate is None or math.isclose(rate, base * scale, rel_tol=1e-6)
        for rate, scale in zip(rates, scales, strict=True)
    )
    return [1.0] * len(scales) if are_in_proportion else scales
