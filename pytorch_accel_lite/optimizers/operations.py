"""Operations on a trainer's optimizer and scheduler, each of which may consist of several parts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeAlias, TypeGuard, TypeVar

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from pytorch_accel_lite.base.types import HasStateDict

T = TypeVar("T")

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
#: The code of the wrapper that torch puts around the ``step`` of every optimizer class.
_WRAPPER = Optimizer.profile_hook_step(lambda optimizer: None).__code__
# torch has no public names for its global hooks. If one of them disappears, every step is wrapped.
_GLOBAL_HOOKS = [
    getattr(torch_optimizer, f"_global_optimizer_{when}_hooks", {"": "unknown"}) for when in ("pre", "post")
]
_is_profiling: Callable[[], bool] = getattr(torch.autograd, "_profiler_enabled", lambda: True)


class NamedParts(Generic[T]):
    """Several optimizers, or their schedulers, by optimizer name."""

    _parts: dict[str, T]

    def __getitem__(self, name: str) -> T:
        if name not in self._parts:
            raise KeyError(f"There is no optimizer {name!r}, only {', '.join(map(repr, self._parts))}.")
        return self._parts[name]

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


def needs_closure(optimizer: TrainerOptimizer) -> list[str]:
    """Return the classes of optimizers whose ``step`` requires a function that computes the gradients again."""
    optimizers = parts_of_optimizer(optimizer).values() or [getattr(optimizer, "optimizer", optimizer)]
    return [type(part).__name__ for part in optimizers if _step_requires_closure(type(part))]


def _step_requires_closure(kind: type) -> bool:
    """Whether ``step`` has a required argument ``closure``, as in LBFGS."""
    try:
        closure = inspect.signature(kind.step).parameters.get("closure")  # type: ignore[attr-defined]
    except (AttributeError, ValueError):  # step is not a method, or not written in Python
        return False
    return closure is not None and closure.default is closure.empty


def set_mode(optimizer: object, training: bool) -> None:
    """Set the mode of an optimizer that has modes. A schedule-free optimizer, for one, trains with other weights."""
    method = getattr(optimizer, "train" if training else "eval", None)
    if callable(method):
        method()


def clear_gradients(optimizer: Optimizer) -> None:
    """Clear the gradients like ``optimizer.zero_grad()``, but 20 times as fast if the class does not override it."""
    if getattr(optimizer.zero_grad, "__func__", None) is torch.optim.Optimizer.zero_grad:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
    else:
        optimizer.zero_grad()


def take_step(optimizer: TrainerOptimizer, *closure: Callable[[], torch.Tensor]) -> None:
    """Step an optimizer like ``optimizer.step()``, but create the record for profilers only while one is running.

    torch creates the record, which takes as long as a small layer, in the wrapper that calls hooks. torch's schedulers
    replace ``optimizer.step`` by a function that notes the call; this function notes it, too.
    """
    wrapped = type(optimizer).step
    replaced = vars(optimizer).get("step")
    has_scheduler = replaced is not None and getattr(replaced, "_wrapped_by_lr_sched", False)
    only_profiled = (
        getattr(wrapped, "__code__", None) is _WRAPPER
        and (replaced is None or (has_scheduler and getattr(replaced, "__wrapped__", None) is wrapped))
        and not getattr(optimizer, "_optimizer_step_pre_hooks", True)
        and not getattr(optimizer, "_optimizer_step_post_hooks", True)
        and not any(_GLOBAL_HOOKS)
    )
    if only_profiled and not _is_profiling():
        if has_scheduler:
            optimizer._opt_called = True
        wrapped.__wrapped__(optimizer, *closure)
    else:
        optimizer.step(*closure)


def parts_of_optimizer(optimizer: TrainerOptimizer) -> dict[str, Optimizer]:
    """Return the parts of a combined optimizer by name, even if Accelerate has wrapped it; else an empty dict."""
    inner = getattr(optimizer, "optimizer", optimizer)
    return inner.parts if isinstance(inner, NamedParts) else {}


def state_class_names(optimizer: TrainerOptimizer) -> list[list[str]]:
    """Return, for each parameter group, the names of the classes that define its optimizer's state.

    These are its class without wrappers, and the bases up to the first class of torch: torch's AdamW does not count as
    an Adam, although it is derived from it.
    """
    parts = parts_of_optimizer(optimizer).values() or [optimizer]
    return [_classes(part) for part in parts for _ in part.param_groups]


def _classes(optimizer: TrainerOptimizer) -> list[str]:
    while isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = optimizer.optimizer
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


def group_names(optimizer: Optimizer) -> list[str]:
    """Return a name for each parameter group: its number, or ``""`` for the only one, after the optimizer's name."""
    names: list[str] = []
    for name, part in (parts_of_optimizer(optimizer) or {"": optimizer}).items():
        count = len(part.param_groups)
        numbers = [""] if count == 1 else map(str, range(count))
        names += ["_".join(filter(None, (name, number))) for number in numbers]
    return names


def follows_metric(scheduler: SchedulerLike) -> bool:
    """Whether a scheduler is stepped with the value of a metric, like ``ReduceLROnPlateau``."""
    return next(iter(inspect.signature(scheduler.step).parameters), "epoch") != "epoch"
