"""Several named optimizers, and their schedulers, that act as one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, overload

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch.optim import Optimizer

from pytorch_accel_lite.base.types import StateDict
from pytorch_accel_lite.optimizers.optimizer_parts import (
    CreateScheduler,
    NamedParts,
    SchedulerLike,
    TrainerOptimizer,
    follows_metric,
    optimized_parameters,
    parts_of_optimizer,
)
from pytorch_accel_lite.optimizers.optimizer_steps import clear_gradients, set_mode, take_step
from pytorch_accel_lite.optimizers.scheduled_options import ParamGroup


class CombinedOptimizer(NamedParts[Optimizer], Optimizer):
    """Several named optimizers that step together, each with its own parameters.

    Created by a trainer from a dict of optimizers, or from a list, whose elements are numbered. It has the parameter
    groups and the state of all its parts, so schedulers, clipping and mixed precision treat it as one optimizer.

    Args:
        optimizers: optimizers by name, which must not share parameters

    Raises:
        ValueError: if there are no optimizers, or two have the same parameter
    """

    def __init__(self, optimizers: Mapping[str, Optimizer]) -> None:
        _check_parts(optimizers)
        parts = dict(optimizers)
        first, *others = (part.defaults for part in parts.values())
        common = {name: value for name, value in first.items() if all(name in other for other in others)}
        # Unlike Optimizer.__init__, this sets up everything except parameter groups.
        super().__setstate__({"_parts": parts, "defaults": common})

    @property
    def param_groups(self) -> list[ParamGroup]:  # type: ignore[override]
        """The parameter groups of all parts. A new list each time: add groups to one of the parts."""
        return [group for part in self._parts.values() for group in part.param_groups]

    @property
    def state(self) -> dict[torch.Tensor, StateDict]:  # type: ignore[override]
        """The state of all parts, by parameter. A new dict each time."""
        return {parameter: state for part in self._parts.values() for parameter, state in part.state.items()}

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Raise an error, because groups must be added to one of the parts.

        Raises:
            TypeError: always
        """
        raise TypeError(
            f"Add parameter groups to one of the optimizers {_quoted_names(self._parts)}, for example with "
            f"trainer.optimizer[{next(iter(self._parts))!r}].add_param_group(...)."
        )

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update the parameters of all parts.

        Args:
            closure: a function that computes the gradients and returns the loss; called once, before any part steps
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts.values():
            take_step(part)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parts."""
        for part in self._parts.values():
            if set_to_none:
                clear_gradients(part)
            else:
                part.zero_grad(set_to_none=False)

    def train(self) -> None:
        """Set the parts that have modes to training mode."""
        for part in self._parts.values():
            set_mode(part, training=True)

    def eval(self) -> None:
        """Set the parts that have modes to evaluation mode."""
        for part in self._parts.values():
            set_mode(part, training=False)

    def state_dict(self) -> StateDict:
        """Return the state in the form of a single optimizer's state, with parameters numbered across all parts."""
        combined: StateDict = {"state": {}, "param_groups": [], "names": [*self._parts]}
        extra, whole = {}, {}
        for name, part in self._parts.items():
            state = part.state_dict()
            if not {"state", "param_groups"} <= state.keys():  # one that wraps another may have a form of its own
                whole[name] = state
                state = {"state": {}, "param_groups": _groups_of_numbers(part)}
            first = sum(_sizes(combined["param_groups"]))
            combined["state"] |= {number + first: values for number, values in state.pop("state").items()}
            groups = state.pop("param_groups")
            combined["param_groups"] += [{**g, "params": [number + first for number in g["params"]]} for g in groups]
            if state:  # further entries of an optimizer's state, such as a step count
                extra[name] = state
        return combined | ({"parts": extra} if extra else {}) | ({"whole": whole} if whole else {})

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a state returned by ``state_dict()``.

        Raises:
            ValueError: if the number of groups or parameters differs, or the order of the optimizers
        """
        saved, names = list(state_dict["param_groups"]), state_dict.get("names", [])  # older states have no names
        if names != [*self._parts] and {*names} == self._parts.keys():
            raise ValueError(f"it has the optimizers in the order {', '.join(names)}. Pass them in this order.")
        sizes, own = _sizes(saved), _sizes(self.param_groups)
        if len(sizes) != len(own):
            raise ValueError(f"it has {len(sizes)} parameter groups, but the optimizers have {len(own)}.")
        if sizes != own:  # before any part is loaded
            raise ValueError(
                f"its parameter groups have {', '.join(map(str, sizes))} parameters, but those of the optimizers "
                f"{', '.join(map(str, own))}."
            )
        states = {}
        first = 0
        for name, part in self._parts.items():
            groups = saved[: len(part.param_groups)]
            saved = saved[len(groups) :]
            end = first + sum(_sizes(groups))
            states[name] = {
                **state_dict.get("parts", {}).get(name, {}),
                "state": {n - first: values for n, values in state_dict["state"].items() if first <= n < end},
                "param_groups": [{**g, "params": [n - first for n in g["params"]]} for g in groups],
            }
            first = end
        for name, state in states.items():
            self._parts[name].load_state_dict(state_dict.get("whole", {}).get(name, state))

    def __getstate__(self) -> dict[str, object]:
        return {"_parts": self._parts, "defaults": self.defaults}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={part!r}' for name, part in self._parts.items())})"


class AcceleratedCombinedOptimizer(AcceleratedOptimizer, NamedParts[Optimizer]):  # type: ignore[misc]
    """Accelerate's wrapper of a ``CombinedOptimizer``, with access to its parts by name.

    Accelerate's class is the first base, so that its objects can be given this class.
    """

    @property
    def _parts(self) -> dict[str, Optimizer]:  # type: ignore[override]
        return self.optimizer.parts  # type: ignore[no-any-return]


class CombinedScheduler(NamedParts[SchedulerLike]):
    """The schedulers of several optimizers, which are stepped together.

    Args:
        optimizer: the trainer's optimizer; each scheduler belongs to one of its parts
        schedulers: the schedulers, by optimizer name
    """

    def __init__(self, optimizer: Optimizer, schedulers: Mapping[str, SchedulerLike]) -> None:
        self.optimizer = optimizer
        self._parts = dict(schedulers)

    def step(self, metrics: float | torch.Tensor | None = None) -> None:
        """Step each scheduler.

        Args:
            metrics: the value passed to schedulers that follow a metric, such as ``ReduceLROnPlateau``
        """
        for part in self._parts.values():
            if metrics is None or not follows_metric(part):
                part.step()
            else:
                part.step(metrics)

    def get_last_lr(self) -> list[float | torch.Tensor]:
        """Return the learning rate of each parameter group of the optimizers."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> StateDict:
        """Return the state of each scheduler, by name."""
        return {name: part.state_dict() for name, part in self._parts.items()}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a state returned by ``state_dict()``.

        Raises:
            ValueError: if the names differ
        """
        if state_dict.keys() != self._parts.keys():
            raise ValueError(
                f"it holds schedulers for {_quoted_names(state_dict)}, not for {_quoted_names(self._parts)}."
            )
        for name, part in self._parts.items():
            part.load_state_dict(state_dict[name])

    def __repr__(self) -> str:
        names = ", ".join(f"{name}={type(part).__name__}" for name, part in self._parts.items())
        return f"{type(self).__name__}({names})"


def combine(optimizer: object) -> TrainerOptimizer:
    """Combine a dict or a list of optimizers into one; return anything else unchanged."""
    if isinstance(optimizer, Mapping):
        return CombinedOptimizer(optimizer)
    if isinstance(optimizer, (list, tuple)):
        return CombinedOptimizer({str(number): part for number, part in enumerate(optimizer)})
    return optimizer


def create_schedulers(create: Mapping[str, CreateScheduler], optimizer: Optimizer) -> CombinedScheduler:
    """Create the schedulers of several optimizers, each by the function of the same name."""
    parts = parts_of_optimizer(optimizer)
    return CombinedScheduler(optimizer, {name: factory(parts[name]) for name, factory in create.items()})


def _check_parts(optimizers: Mapping[Any, object]) -> None:
    if not optimizers:
        raise ValueError(f"optimizer={optimizers!r} contains no optimizer. Pass at least one, or None.")
    owners: dict[torch.Tensor, str] = {}
    for name, part in optimizers.items():
        if not isinstance(name, str):
            raise TypeError(f"optimizer={optimizers!r}: the names of optimizers must be strings, not {name!r}.")
        if not isinstance(part, Optimizer):
            hint = " A function that creates several must return all of them." if callable(part) else ""
            raise TypeError(f"optimizer[{name!r}]={part!r} must be an instance of torch.optim.Optimizer.{hint}")
        for parameter in optimized_parameters(part):
            if parameter in owners:
                raise ValueError(
                    f"The optimizers {owners[parameter]!r} and {name!r} have the same parameter, of shape "
                    f"{tuple(parameter.shape)}: both would update it. Give each parameter to one of them."
                )
            owners[parameter] = name


def _groups_of_numbers(optimizer: Optimizer) -> list[StateDict]:
    """Return the parameter groups in the form of a state, without their options."""
    numbers = itertools.count()
    return [{"params": [next(numbers) for _ in group["params"]]} for group in optimizer.param_groups]


def _sizes(groups: Iterable[ParamGroup]) -> list[int]:
    """Return the number of parameters in each group."""
    return [len(group["params"]) for group in groups]


def _quoted_names(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
