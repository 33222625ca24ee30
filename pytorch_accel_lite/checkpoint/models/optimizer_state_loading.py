"""Loading the state of an optimizer, whose parameters may be sharded; ``full_state_dict`` gathers it for saving."""

from __future__ import annotations

from functools import partial

import torch
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from pytorch_accel_lite.base.types import StateDict
from pytorch_accel_lite.checkpoint.models.weights import sharded_like
from pytorch_accel_lite.optimizers.optimizer_parts import (
    TrainerOptimizer,
    is_created,
    optimized_parameters,
    step_modules,
)
from pytorch_accel_lite.optimizers.scheduled_options import note_options
from pytorch_accel_lite.optimizers.types_of_states import load_keeping_types

#: The entries of the states of torch's optimizers that have the shape of the parameter, unlike steps.
_SHAPED_LIKE_PARAMETERS = {
    *("momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg"),
    *("grad_avg", "acc_delta", "sum", "ax", "prev"),
}


def load_optimizer_state(optimizer: TrainerOptimizer, state: StateDict) -> None:
    """Load the full state of an optimizer; its parameters may be sharded.

    Raises:
        ValueError: if the state does not fit the optimizer's groups and parameters
    """
    if is_created(optimizer):
        _check_shapes_in(state, optimizer)
    groups = getattr(optimizer, "param_groups", ())  # a DeferredOptimizer keeps the state as it is
    parameters = dict(enumerate(p for group in groups for p in group["params"]))
    sharded = {
        index: {name: sharded_like(parameters.get(index), value) for name, value in values.items()}
        for index, values in state.get("state", {}).items()
    }
    had = [{*group} for group in groups]
    before = optimizer.state_dict() if is_created(optimizer) else {}
    load = partial(load_keeping_types, optimizer) if is_created(optimizer) else optimizer.load_state_dict
    load({**state, "state": sharded} if "state" in state else state)  # a wrapper's state may have its own form
    # The optimizer's class fills in options that a newer torch has added.
    now = getattr(optimizer, "param_groups", ())
    lost = {key for keys, group in zip(had, now, strict=False) for key in keys - group.keys()}
    if missing := sorted(lost & getattr(optimizer, "defaults", {}).keys()):
        load_keeping_types(optimizer, before)
        raise ValueError(f"it is of another class of optimizers, without {', '.join(missing)}")
    if is_created(optimizer):
        note_options(optimizer)


def _check_shapes_in(state: StateDict, optimizer: Optimizer) -> None:
    """Raise an error if a state is for parameters of other shapes, as torch notices only in the next step.

    Only for torch's own algorithms: those of others, such as GaLore, may have smaller states on purpose.
    """
    saved = [len(group["params"]) for group in state.get("param_groups", ())]
    if saved != [len(group["params"]) for group in optimizer.param_groups]:
        return  # the optimizer refuses it
    kinds = zip(saved, step_modules(optimizer), strict=True)
    is_of_torch = [module.startswith("torch.optim.") for count, module in kinds for _ in range(count)]
    names = [name for group in optimizer.param_groups for name in group.get("param_names", [""] * len(group["params"]))]
    for number, parameter in enumerate(optimized_parameters(optimizer)):
        for key in _SHAPED_LIKE_PARAMETERS & state["state"].get(number, {}).keys() if is_of_torch[number] else ():
            value = state["state"][number][key]
            if isinstance(value, torch.Tensor) and not is_lazy(parameter) and value.shape != parameter.shape:
                raise ValueError(
                    f"{key!r} of parameter {number} {f'({names[number]}) ' if names[number] else ''}has the shape "
                    f"{tuple(value.shape)} there, but the parameter has {tuple(parameter.shape)} here"
                )
