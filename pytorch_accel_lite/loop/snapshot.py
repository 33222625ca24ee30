"""Snapshots, with which the package tries something and restores everything afterwards."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import TypeGuard

import numpy as np
import torch
from torch import nn

from pytorch_accel_lite.base.modules import normalised_weights
from pytorch_accel_lite.base.nested_values import distinct_elements
from pytorch_accel_lite.base.random_generators import (
    capture_generators,
    restore_generator,
    restore_generators,
    state_of_generator,
)
from pytorch_accel_lite.base.reachable_objects import is_generator
from pytorch_accel_lite.base.types import HasStateDict
from pytorch_accel_lite.optimizers.optimizer_parts import optimized_parameters
from pytorch_accel_lite.optimizers.types_of_states import load_state_of
from pytorch_accel_lite.run.history import count_values, shorten_to
from pytorch_accel_lite.run.run import TrainerLike
from pytorch_accel_lite.run.trained_objects import (
    all_registered_objects,
    other_modules,
    other_optimizers,
    trained_objects,
)

_MOST_ELEMENTS = 64  # of a container whose elements are kept, too


class Snapshot(ExitStack):
    """Restores the states that it keeps at the end of a ``with`` block or in ``close()``, even if one of them fails.

    The state that was kept last is restored first. Outside a ``with`` block and without ``close()``, nothing is
    restored.

    Args:
        on_host: whether to copy tensors to host memory, leaving room on the device
    """

    def __init__(self, on_host: bool = False) -> None:
        super().__init__()
        self._on_host = on_host

    def keep_generators(self) -> None:
        """Keep the states of the random generators."""
        self.callback(restore_generators, capture_generators())

    def keep_generators_of(self, owners: Iterable[object]) -> None:
        """Keep the states of the random generators that are attributes of objects."""
        for value in [value for owner in owners for value in getattr(owner, "__dict__", {}).values()]:
            if is_generator(value):
                self.callback(restore_generator, value, state_of_generator(value))

    def keep_states(self, owners: Iterable[HasStateDict]) -> None:
        """Keep the states of objects with ``state_dict()`` and ``load_state_dict(state)``, restored in this order."""
        for owner, state in reversed([(owner, copy.deepcopy(owner.state_dict())) for owner in owners]):
            self.callback(load_state_of, owner, state)

    def keep_tensors(self, tensors: Iterable[torch.Tensor]) -> None:
        """Keep the values of tensors."""
        for tensor in tensors:
            distinct = distinct_elements(tensor.detach())
            self.callback(_copy_back, tensor, distinct.to("cpu", copy=True) if self._on_host else distinct.clone())

    def keep_buffers(self, modules: Iterable[nn.Module]) -> None:
        """Keep the buffers of modules and their parts, which a forward pass may change or replace.

        It also normalises weights of embeddings in place (``max_norm``), so these are kept, too.
        """
        modules = list(modules)
        self.keep_tensors(normalised_weights(modules))
        for part in dict.fromkeys(chain.from_iterable(module.modules() for module in modules)):
            for name, buffer in vars(part)["_buffers"].items():
                self.keep_tensors([] if buffer is None else [buffer])
                self.callback(setattr, part, name, buffer)

    def keep_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Keep the gradients of parameters, including the values of the gradients."""
        for parameter in parameters:
            self.keep_tensors([] if parameter.grad is None else [parameter.grad])
            self.callback(setattr, parameter, "grad", parameter.grad)

    def set_gradients_aside(self, parameters: Iterable[nn.Parameter]) -> None:
        """Keep the gradients of parameters without copying them. Until then, the parameters have no gradients."""
        for parameter in parameters:
            self.callback(setattr, parameter, "grad", parameter.grad)
            parameter.grad = None


class StepSnapshot(Snapshot):
    """Keeps all that a forward and backward pass may change.

    These are gradients, buffers, generators, logged values, registered objects, and modules that the pass itself trains
    with optimizers in attributes of the trainer.

    Args:
        trainer: the trainer whose state is kept

    Attributes:
        gradients: the gradients from before the pass, by parameter
    """

    def __init__(self, trainer: TrainerLike) -> None:
        super().__init__()
        model = trainer.get_model()
        beside = other_modules(trainer).values()
        parameters = [*model.parameters(), *optimized_parameters(trainer.optimizer)]
        others = chain.from_iterable(optimized_parameters(other) for other in other_optimizers(trainer).values())
        trained = dict.fromkeys(others)
        self.gradients = {parameter: parameter.grad for parameter in parameters}
        # The pass itself may use the gradients of other parameters, so these stay in place.
        elsewhere = dict.fromkeys(chain(trained, *(module.parameters() for module in beside)))
        self.keep_gradients(parameter for parameter in elsewhere if parameter not in self.gradients)
        self.set_gradients_aside(self.gradients)
        stepped = [value for value in trained_objects(trainer).values() if not isinstance(value, nn.Module)]
        self.keep_states([trainer.current_run.loss_trackers, *stepped, *all_registered_objects(trainer).values()])
        self.keep_buffers([model, *beside])
        self.keep_tensors(trained)
        self.keep_generators()

    def add_gradients(self) -> None:
        """Add the gradients of the pass to the gradients from before it."""
        for parameter, gradient in self.gradients.items():
            if gradient is not None:
                if parameter.grad is not None:
                    gradient.add_(parameter.grad)
                parameter.grad = gradient


def _copy_back(tensor: torch.Tensor, before: torch.Tensor) -> None:
    if tensor.is_inference():  # torch refuses to change it
        return
    with torch.no_grad():
        distinct_elements(tensor).copy_(before)


@contextmanager
def replaced(owner: object, **values: object) -> Iterator[None]:
    """Replace attributes of an object for the duration of a block."""
    with ExitStack() as before:
        for name, value in values.items():
            before.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield


@contextmanager
def preserving_attributes(*owners: object) -> Iterator[None]:
    """Restore all attributes of objects after a block.

    This includes the contents of lists, dicts, sets and deques, of tensors and arrays, also in short lists and dicts,
    and the states of random generators.
    """
    with Snapshot() as before:
        before.keep_generators_of(owners)
        for owner in owners:
            held = dict(vars(owner))
            before.callback(vars(owner).update, held)
            before.callback(vars(owner).clear)
            for part in chain.from_iterable(map(_with_parts, held.values())):
                if _is_plain_tensor(part):
                    before.keep_tensors([part])
                elif type(part) is np.ndarray and part.flags.writeable:
                    before.callback(np.copyto, part, part.copy())
            for value in held.values():
                if isinstance(value, (list, dict, set, deque)):
                    add = value.update if isinstance(value, (dict, set)) else value.extend
                    before.callback(add, copy.copy(value))
                    before.callback(value.clear)
        yield


def _with_parts(value: object) -> Iterable[object]:
    """Return a value and the elements of a short container. The elements of long ones are hardly changed in place."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple, deque)) else ()
    return chain([value], parts if len(parts) <= _MOST_ELEMENTS else ())


def _is_plain_tensor(value: object) -> TypeGuard[torch.Tensor]:
    """Whether a value is a tensor that a step may change in place, and no result that still has its graph."""
    return type(value) is torch.Tensor and value.layout is torch.strided and value.grad_fn is None and not value.is_meta


@contextmanager
def leaving_no_trace(trainer: TrainerLike) -> Iterator[None]:
    """Restore all that a forward and backward pass may change, users' attributes included, after a block."""
    modules = [trainer.get_model(), *other_modules(trainer).values()]
    loss_func = [trainer.loss_func] if hasattr(trainer.loss_func, "__dict__") else []  # it may be no module
    parts = chain.from_iterable(module.modules() for module in modules)
    with preserving_attributes(*dict.fromkeys([trainer, *loss_func, *parts])), StepSnapshot(trainer) as before:
        before.callback(shorten_to, trainer.run_history, count_values(trainer.run_history))
        yield
