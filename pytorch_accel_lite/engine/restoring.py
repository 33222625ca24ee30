"""Trying something without leaving a trace: capturing the state of a training before, and restoring it afterwards."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn

from pytorch_accel_lite.base.inspection import distinct_elements
from pytorch_accel_lite.base.protocols import TrainerLike
from pytorch_accel_lite.base.randomness import capture_generators, restore_generators
from pytorch_accel_lite.optimizers import attributes
from pytorch_accel_lite.optimizers.operations import optimized_parameters


class Buffers:
    """The buffers of modules as they are now: a forward pass may change them, or assign others in their place.

    :param modules: modules, whose parts are included
    :param on_host: whether to copy them to host memory
    """

    def __init__(self, modules: Iterable[nn.Module], on_host: bool = False) -> None:
        parts = dict.fromkeys(chain.from_iterable(module.modules() for module in modules))
        self._kept = [
            (part, name, buffer, None if buffer is None else _copy(buffer, on_host))
            for part in parts
            for name, buffer in vars(part)["_buffers"].items()
        ]

    def restore(self) -> None:
        """Restore the buffers and their contents: all of them, even if one cannot be."""
        with ExitStack() as last_first:
            for part, name, buffer, before in self._kept:
                last_first.callback(setattr, part, name, buffer)
                if buffer is not None and before is not None:
                    last_first.callback(_copy_back, buffer, before)


class Snapshot:
    """Captured tensors, states of objects and random generators. Gradients are set aside for the trial.

    :param tensors: tensors to copy
    :param parameters: parameters whose gradients are set aside without being copied
    :param owners: objects with ``state_dict()`` and ``load_state_dict(state)``
    :param modules: modules whose buffers to copy
    :param on_host: whether to copy tensors to host memory, leaving room on the device for the trial
    :ivar gradients: the gradients before the trial, by parameter
    """

    def __init__(
        self,
        tensors: Iterable[torch.Tensor],
        parameters: Iterable[nn.Parameter],
        owners: Iterable[Any] = (),
        modules: Iterable[nn.Module] = (),
        on_host: bool = False,
    ) -> None:
        self._generators = capture_generators()
        self._tensors = [(tensor, _copy(tensor, on_host)) for tensor in tensors]
        self._buffers = Buffers(modules, on_host)
        self._states = [(owner, copy.deepcopy(owner.state_dict())) for owner in owners]
        self.gradients = {parameter: parameter.grad for parameter in parameters}
        for parameter in self.gradients:
            parameter.grad = None

    def add_gradients(self) -> None:
        """Keep the trial, and add its gradients to those before it."""
        for parameter, gradient in self.gradients.items():
            if gradient is not None:
                if parameter.grad is not None:
                    gradient.add_(parameter.grad)
                parameter.grad = gradient

    def restore(self) -> None:
        """Undo the trial: all of it, even if a part cannot be undone."""
        with ExitStack() as last_first:
            last_first.callback(self._restore_gradients)
            for owner, state in reversed(self._states):
                last_first.callback(owner.load_state_dict, state)
            last_first.callback(self._buffers.restore)
            for tensor, before in self._tensors:
                last_first.callback(_copy_back, tensor, before)
            last_first.callback(restore_generators, self._generators)

    def _restore_gradients(self) -> None:
        for parameter, gradient in self.gradients.items():
            parameter.grad = gradient


class StepSnapshot(Snapshot):
    """Captured: what a forward and backward pass may change.

    Gradients, buffers, generators, logged values, registered objects, and what the pass itself trains with optimizers
    that are attributes of the trainer.
    """

    def __init__(self, trainer: TrainerLike) -> None:
        model = trainer.get_model()
        beside = attributes.modules(trainer).values()
        own = [*model.parameters(), *optimized_parameters(trainer.optimizer)]
        others = chain.from_iterable(optimized_parameters(other) for other in attributes.optimizers(trainer).values())
        trained = dict.fromkeys(others)
        steppers = [owner for owner in attributes.trained(trainer).values() if not isinstance(owner, nn.Module)]
        owners = [trainer.current_run.loss_trackers, *steppers, *attributes.registered(trainer).values()]
        super().__init__(trained, own, owners, [model, *beside])
        # The pass itself may use these gradients, so they are not set aside.
        of_others = dict.fromkeys(chain(trained, *(module.parameters() for module in beside)))
        self._gradients_beside = [
            (parameter, parameter.grad, None if parameter.grad is None else _copy(parameter.grad))
            for parameter in of_others
            if parameter not in self.gradients
        ]

    def _restore_gradients(self) -> None:
        super()._restore_gradients()
        for parameter, gradient, before in self._gradients_beside:
            if gradient is not None and before is not None:
                _copy_back(gradient, before)
            parameter.grad = gradient


def _copy(tensor: torch.Tensor, on_host: bool = False) -> torch.Tensor:
    own = distinct_elements(tensor.detach())
    return own.to("cpu", copy=True) if on_host else own.clone()


def _copy_back(tensor: torch.Tensor, before: torch.Tensor) -> None:
    """Restore what a tensor held."""
    if tensor.is_inference():  # torch refuses to change it
        return
    with torch.no_grad():
        distinct_elements(tensor).copy_(before)


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Replace attributes of an object for a block."""
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextmanager
def preserving_attributes(*owners: Any) -> Iterator[None]:
    """Restore all attributes of objects after a block, including the contents of lists, dicts, sets and deques."""
    before = [(vars(owner), {name: (value, _held(value)) for name, value in vars(owner).items()}) for owner in owners]
    try:
        yield
    finally:
        for now, values in before:
            for value, held in values.values():
                if held is not None:
                    value.clear()
                    (value.update if isinstance(value, (dict, set)) else value.extend)(held)
            now.clear()
            now.update({name: value for name, (value, _) in values.items()})


def _held(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, (list, dict, set, deque)) else None
