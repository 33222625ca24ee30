"""Optimizers from factories, which are called when a run first prepares the model for training."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from pytorch_accel_lite.base.display import short_repr
from pytorch_accel_lite.base.types import StateDict
from pytorch_accel_lite.checkpoint.models.optimizer_state_loading import load_optimizer_state
from pytorch_accel_lite.optimizers.combined_optimizers import combine
from pytorch_accel_lite.optimizers.optimizer_parts import OptimizerFactory, Optimizers, TrainerOptimizer, is_created


class DeferredOptimizer:
    """Stands for an optimizer that a factory will create when a run first prepares the model for training.

    It has no parameter groups. A state loaded into it is kept for the real optimizer.

    Args:
        factory: called with a list of the trainable parameters; or with the model, or a list of names and parameters,
            if its first argument is called ``model`` or ``named_parameters``

    Attributes:
        name: the factory as error messages show it
    """

    def __init__(self, factory: OptimizerFactory) -> None:
        self.factory = factory
        self.name = short_repr(factory)
        self._state: StateDict | None = None

    def make(self, model: nn.Module) -> Optimizer:
        """Create the optimizer for a model that is otherwise ready to be trained.

        Raises:
            ValueError: if no parameter of the model is trainable
            TypeError: if the factory does not return an optimizer, or several in a dict or a list
        """
        trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        if not trainable:
            raise ValueError(
                f"optimizer={self.name}: no parameter of {type(model).__name__} requires a gradient, so there is "
                "nothing to optimize. Was everything frozen?"
            )
        by_argument = {"model": model, "named_parameters": list(trainable.items())}
        optimizer = combine(self.factory(by_argument.get(_first_argument(self.factory), list(trainable.values()))))
        if not is_created(optimizer):
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

    def state_dict(self) -> StateDict | None:
        """Return the state that was loaded; ``None`` if there is none."""
        return self._state

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Keep a state for the real optimizer."""
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


def combine_or_defer(optimizer: Optimizers | OptimizerFactory | None) -> TrainerOptimizer:
    """Combine several optimizers into one, and wrap a factory as a ``DeferredOptimizer``."""
    if callable(optimizer) and not is_created(optimizer):
        return DeferredOptimizer(optimizer)
    return combine(optimizer)


def _first_argument(factory: Callable[..., object]) -> str:
    try:
        return next(iter(inspect.signature(factory).parameters), "")
    except ValueError:
        return ""
