"""Optimizers that are made of a model's parameters once these are in their final form."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from torch import nn

from pytorch_accel_lite.checkpoint.weights import load_optimizer_state
from pytorch_accel_lite.optimizers.combined import combine
from pytorch_accel_lite.optimizers.operations import OptimizerFactory, is_made

_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
# What a factory is called with, where its first argument has one of these names; else with the parameters.
_WANTED: Mapping[str, Callable[[nn.Module], Any]] = {
    "model": lambda model: model,
    "named_parameters": lambda model: [(name, p) for name, p in model.named_parameters() if p.requires_grad],
}


class UnmadeOptimizer:
    """The optimizer of a trainer that was given a factory, until a run first prepares the model for training.

    It has no parameter groups. A state that is loaded into it is kept for the optimizer that will be made.

    :param factory: called with a list of the trainable parameters; with the model, or with a list of the names and
        parameters, where its first argument is called ``model`` or ``named_parameters``
    """

    def __init__(self, factory: OptimizerFactory) -> None:
        self.factory = factory
        self.name = _name(factory)
        self._state: dict[str, Any] | None = None

    def make(self, model: nn.Module) -> Any:
        """Return the optimizer for a model that is otherwise ready to be trained.

        :raises ValueError: when no parameter of the model is to be trained
        :raises TypeError: when the factory returns anything but an optimizer, or several in a dict or a list
        """
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ValueError(
                f"optimizer={self.name}: no parameter of {type(model).__name__} requires a gradient, so there is "
                "nothing to optimize. Was everything frozen?"
            )
        wanted = _WANTED.get(_first_argument(self.factory), _trainable)
        optimizer = combine(self.factory(wanted(model)))
        if not is_made(optimizer):
            raise TypeError(
                f"optimizer={self.name} returned {optimizer!r}. It must return a torch.optim.Optimizer, or a dict or "
                "a list of them."
            )
        if self._state is not None:
            self._load(optimizer, self._state)
        return optimizer

    def _load(self, optimizer: Any, state: dict[str, Any]) -> None:
        try:
            load_optimizer_state(optimizer, state)
        except (ValueError, KeyError) as error:
            raise ValueError(
                f"The state that was loaded for the optimizer does not fit what optimizer={self.name} returned: {error}"
            ) from error

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state that was loaded, if one was."""
        return self._state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep a state for the optimizer that will be made."""
        self._state = copy.deepcopy(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"trainer.optimizer has no {name!r} yet: optimizer={vars(self).get('name')} is called when train(), or a "
            "tool such as find_lr(), first prepares the model; from then on trainer.optimizer is what it returned."
        )

    def __repr__(self) -> str:
        return f"{self.name} (not called yet)"


def combine_or_defer(optimizer: Any) -> Any:
    """Return optimizers as one, and a factory as the optimizer that it has yet to make."""
    is_factory = callable(optimizer) and not is_made(optimizer)
    return UnmadeOptimizer(optimizer) if is_factory else combine(optimizer)


def check_factory(factory: Callable[..., Any]) -> None:
    """Check that a factory needs nothing but the parameters.

    :raises TypeError: when it needs more
    """
    missing = ", ".join(f"{argument}=..." for argument in _arguments_missing(factory))
    if missing:
        name = _name(factory)
        given = name.removesuffix(")") if isinstance(factory, partial) else f"partial({name}"
        raise TypeError(
            f"optimizer={name} is called with the model's parameters alone. Pass functools.{given}, {missing})."
        )


def _arguments_missing(factory: Callable[..., Any]) -> list[str]:
    """Return the names of the arguments that a factory needs besides the parameters."""
    try:
        parameters = list(inspect.signature(factory).parameters.values())
    except ValueError:  # what is not written in Python has no signature
        return []
    by_name = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    by_place = [p.name for p in parameters if p.kind in _BY_PLACE and p.default is p.empty]
    return by_place[1:] + by_name


def _first_argument(factory: Callable[..., Any]) -> str:
    try:
        return next(iter(inspect.signature(factory).parameters), "")
    except ValueError:
        return ""


def _trainable(model: nn.Module) -> Iterable[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _name(factory: Any) -> str:
    """Return a factory as the user wrote it, as far as that is known: ``AdamW``, ``partial(AdamW, lr=0.001)``."""
    if isinstance(factory, partial):
        given = [*map(repr, factory.args), *(f"{name}={value!r}" for name, value in factory.keywords.items())]
        return f"partial({', '.join([_name(factory.func), *given])})"
    return getattr(factory, "__name__", None) or type(factory).__name__
