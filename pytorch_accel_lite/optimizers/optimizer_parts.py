"""What a trainer's optimizer and scheduler consist of: their types, parts by name, parameters, names of groups."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeAlias, TypeGuard, TypeVar

import torch
from torch.optim import Optimizer

from pytorch_accel_lite.base.types import HasStateDict
from pytorch_accel_lite.base.user_code import is_of_library

#: An optimizer, or several optimizers by name or number, as a trainer takes them.
Optimizers = Optimizer | Mapping[str, Optimizer] | Sequence[Optimizer]

#: A function that creates one or several optimizers from a model's trainable parameters.
OptimizerFactory = Callable[..., Optimizers]


class SchedulerLike(HasStateDict, Protocol):
    """A scheduler of torch, of timm, or of the user."""

    @property
    def step(self) -> Callable[..., object]: ...  # noqa: D102


#: A trainer's optimizer: ``None``, a ``DeferredOptimizer``, an optimizer of torch, or Accelerate's wrapper of it.
TrainerOptimizer: TypeAlias = Any

#: A trainer's scheduler: ``None``, a scheduler of torch, timm or the user, or several by optimizer name.
TrainerScheduler: TypeAlias = Any

#: A function that creates a scheduler from an optimizer.
CreateScheduler: TypeAlias = Callable[..., SchedulerLike]

#: A function that creates a scheduler, or several functions by optimizer name.
SchedulerFactory: TypeAlias = CreateScheduler | Mapping[str, CreateScheduler]


T = TypeVar("T")


class NamedParts(Generic[T]):
    """Several optimizers, or their schedulers, by optimizer name."""

    _parts: dict[str, T]

    def __getitem__(self, name: str) -> T:
        if name not in self._parts:
            raise KeyError(f"There is no optimizer {name!r}, only {', '.join(map(repr, self._parts))}.")
        return self._parts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    @property
    def parts(self) -> dict[str, T]:
        """The optimizers or schedulers, by optimizer name."""
        return dict(self._parts)


def is_created(optimizer: object) -> TypeGuard[Optimizer]:
    """Whether a value is an optimizer, rather than ``None`` or a factory that has not been called yet."""
    return hasattr(optimizer, "param_groups")


def optimized_parameters(optimizer: Optimizer) -> list[torch.nn.Parameter]:
    """Return the parameters of all groups of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def parts_of_optimizer(optimizer: TrainerOptimizer) -> dict[str, Optimizer]:
    """Return the parts of a combined optimizer by name, even if Accelerate has wrapped it; else an empty dict."""
    inner = getattr(optimizer, "optimizer", optimizer)
    return inner.parts if isinstance(inner, NamedParts) else {}


def single_optimizers(optimizer: TrainerOptimizer) -> dict[str, TrainerOptimizer]:
    """Return the parts of a combined optimizer by name, or one that is not combined as ``""``."""
    return parts_of_optimizer(optimizer) or {"": optimizer}


def unwrapped_parts(optimizer: TrainerOptimizer) -> list[Optimizer]:
    """Return the parts of a combined optimizer, or one that is not combined, without Accelerate's wrapper."""
    inner: TrainerOptimizer = getattr(optimizer, "optimizer", optimizer)
    return list(inner.parts.values()) if isinstance(inner, NamedParts) else [inner]


def state_class_names(optimizer: TrainerOptimizer) -> list[list[str]]:
    """Return, for each parameter group, the names of the classes that define its optimizer's state.

    These are its class without wrappers, and the bases up to the first class of torch: torch's AdamW does not count as
    an Adam, although it is derived from it.
    """
    return [_classes(part) for part in single_optimizers(optimizer).values() for _ in part.param_groups]


def step_modules(optimizer: TrainerOptimizer) -> list[str]:
    """Return, for each parameter group, the module whose code steps it: ``torch.optim.adam``, also if derived."""
    parts = single_optimizers(optimizer).values()
    steps = [(getattr(type(without_wrappers(part)), "step", None), part.param_groups) for part in parts]
    return [str(getattr(step, "__module__", "")) for step, groups in steps for _ in groups]


def without_wrappers(optimizer: TrainerOptimizer) -> Optimizer:
    """Return the optimizer in the wrapper of Accelerate, or itself."""
    while isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = optimizer.optimizer
    return optimizer  # type: ignore[no-any-return]


def _classes(optimizer: TrainerOptimizer) -> list[str]:
    optimizer = without_wrappers(optimizer)
    names = []
    for kind in type(optimizer).__mro__:
        if issubclass(kind, Optimizer) and kind is not Optimizer:
            names.append(kind.__qualname__.rpartition(".")[2])  # decorators that rename a class keep it
            if kind.__module__.startswith("torch.optim"):
                break
    return names


def schedulers_in(scheduler: TrainerScheduler) -> dict[str, SchedulerLike]:
    """Return the schedulers by optimizer name, which is ``""`` for a single scheduler."""
    return scheduler.parts if isinstance(scheduler, NamedParts) else {"": scheduler}


def scheduler_class_names(scheduler: TrainerScheduler) -> dict[str, list[str]]:
    """Return the names of the classes of each scheduler by optimizer name: its class, and bases up to a library's."""
    parts = {} if scheduler is None else schedulers_in(scheduler)
    return {name: _classes_up_to_library(type(part)) for name, part in parts.items()}


def _classes_up_to_library(kind: type) -> list[str]:
    names: list[str] = []
    for each in kind.__mro__[:-1]:  # without object
        names.append(each.__name__)
        if is_of_library(each.__module__):
            break
    return names


def group_names(optimizer: Optimizer) -> list[str]:
    """Return a name for each parameter group: its number, or ``""`` for the only one, after the optimizer's name."""
    names: list[str] = []
    for name, part in single_optimizers(optimizer).items():
        count = len(part.param_groups)
        numbers = [""] if count == 1 else map(str, range(count))
        names += ["_".join(filter(None, (name, number))) for number in numbers]
    return names


def follows_metric(scheduler: SchedulerLike) -> bool:
    """Whether a scheduler is stepped with the value of a metric, like ``ReduceLROnPlateau``."""
    return next(iter(inspect.signature(scheduler.step).parameters), "epoch") != "epoch"
