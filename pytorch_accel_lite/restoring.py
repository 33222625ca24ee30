"""Trying something without leaving a trace: capturing the state of a training before, and restoring it afterwards."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pytorch_accel_lite import attributes
from pytorch_accel_lite.optimizers import optimized_parameters
from pytorch_accel_lite.randomness import capture_generators, restore_generators

if TYPE_CHECKING:
    from pytorch_accel_lite.trainer import Trainer


class Snapshot:
    """Captured tensors, states of objects and random generators. Gradients are set aside for the trial.

    :param tensors: tensors to copy
    :param parameters: parameters whose gradients are set aside without being copied
    :param owners: objects with ``state_dict()`` and ``load_state_dict(state)``
    :param on_host: whether to copy tensors to host memory, leaving room on the device for the trial
    :ivar gradients: the gradients before the trial, by parameter
    """

    def __init__(
        self,
        tensors: Iterable[torch.Tensor],
        parameters: Iterable[nn.Parameter],
        owners: Iterable[Any] = (),
        on_host: bool = False,
    ) -> None:
        self._generators = capture_generators()
        self._tensors = [(t, t.detach().to("cpu", copy=True) if on_host else t.detach().clone()) for t in tensors]
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
        """Undo the trial."""
        restore_generators(self._generators)
        with torch.no_grad():
            for tensor, before in self._tensors:
                tensor.copy_(before)
        for owner, state in self._states:
            owner.load_state_dict(state)
        for parameter, gradient in self.gradients.items():
            parameter.grad = gradient


def snapshot_of_step(trainer: Trainer, with_attributes: bool = False) -> Snapshot:
    """Capture what a forward and backward pass changes: gradients, buffers, generators and logged values.

    :param with_attributes: whether to include registered objects, modules that are attributes of the trainer, and what
        optimizers that are attributes train
    """
    model = trainer.get_model()
    loss = trainer.loss_func.buffers() if isinstance(trainer.loss_func, nn.Module) else ()
    parameters = chain(model.parameters(), optimized_parameters(trainer.optimizer))
    if not with_attributes:
        return Snapshot(chain(model.buffers(), loss), parameters, [trainer.current_run.loss_trackers])
    parameters = chain(parameters, attributes.all_optimized_parameters(trainer))
    owners = chain(attributes.trained(trainer).values(), trainer.registered_objects.values())
    return Snapshot(chain(model.buffers(), loss), parameters, owners)


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
