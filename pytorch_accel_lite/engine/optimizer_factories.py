"""Optimizers that are made of a model's parameters once these are in their final form."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from pytorch_accel_lite.base.reprs import short
from pytorch_accel_lite.checkpoint.weights import load_optimizer_state
from pytorch_accel_lite.optimizers.combined import combine
from pytorch_accel_lite.optimizers.operations import OptimizerFactory, is_made


class UnmadeOptimizer:
    """The optimizer of a trainer that was given a factory, until a run first prepares the model for training.

    It has no parameter groups. A state that is loaded into it is kept for the optimizer that will be made.

    :param factory: called with a list of the trainable parameters; with the model, or with a list of the names and
        parameters, where its first argument is called ``model`` or ``named_parameters``
    """

    def __init__(self, factory: OptimizerFactory) -> None:
        self.factory = factory
        self.name = short(factory)
        self._state: dict[str, Any] | None = None

    def make(self, model: nn.Module) -> Any:
        """Return the optimizer for a model that is otherwise ready to be trained.

        :raises ValueError: when no parameter of the model is to be trained
        :raises TypeError: when the factory returns anything but an optimizer, or several in a dict or a list
        """
        trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        if not trainable:
            raise ValueError(
                f"optimizer={self.name}: no parameter of {type(model).__name__} requires a gradient, so there is "
                "nothing to optimize. Was everything frozen?"
            )
        by_argument = {"model": model, "named_parameters": list(trainable.items())}
        optimizer = combine(self.factory(by_argument.get(_first_argument(self.factory), list(trainable.values()))))
        if not is_made(optimizer):
            raise TypeError(
                f"optimizer={self.name} returned {optimizer!r}. It must return a torch.optim.Optimizer, or a dict or "
                "a list of them."
            )
        if self._state is not None:
            try:
                load_optimizer_state(optimizer, self._state)
            except (ValueError, KeyError) as error:
                raise ValueError(
                    f"The state that was loaded does not fit what optimizer={self.name} returned: {error}"
                ) from error
        return optimizer

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


def _first_argument(factory: Callable[..., Any]) -> str:
    try:
        return next(iter(inspect.signature(factory).parameters), "")
    except ValueError:
        return ""
