"""Steps of a trainer's optimizer, its mode, its gradients, and what a gradient scaler knows of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from pytorch_accel_lite.optimizers.optimizer_parts import TrainerOptimizer, unwrapped_parts

#: The code of the wrapper that torch puts around the ``step`` of every optimizer class.
_WRAPPER = Optimizer.profile_hook_step(lambda optimizer: None).__code__
# torch has no public names for its global hooks. If one of them disappears, every step is wrapped.
_GLOBAL_HOOKS = [
    getattr(torch_optimizer, f"_global_optimizer_{when}_hooks", {"": "unknown"}) for when in ("pre", "post")
]
_is_profiling: Callable[[], bool] = getattr(torch.autograd, "_profiler_enabled", lambda: True)


def needs_closure(optimizer: TrainerOptimizer) -> list[str]:
    """Return the classes of optimizers whose ``step`` requires a function that computes the gradients again."""
    return [type(part).__name__ for part in unwrapped_parts(optimizer) if _step_requires_closure(type(part))]


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


def states_of_scaler(scaler: torch.amp.GradScaler | None) -> dict[int, dict[str, object]] | None:
    """Return what a gradient scaler knows of the gradients of an update, by the id of the optimizer.

    torch has no public name for it, and a scaler that is disabled does not have it.
    """
    return getattr(scaler, "_per_optimizer_states", None)


def forget_unscaled(scaler: torch.amp.GradScaler | None) -> None:
    """Let a gradient scaler forget that it has unscaled gradients, for an update that was not made.

    It would refuse to unscale the next ones, or leave them scaled.
    """
    if (states := states_of_scaler(scaler)) is not None:
        states.clear()


def take_step(optimizer: TrainerOptimizer, *closure: Callable[[], torch.Tensor]) -> None:
    """Step an optimizer like ``optimizer.step()``, but create the record for profilers only while one is running.

    torch creates the record, which takes as long as a small layer, in the wrapper that calls hooks. torch's schedulers
    replace ``optimizer.step`` by a function that notes the call; this function notes it, too.
    """
    wrapped: Any = getattr(type(optimizer), "step", None)  # a wrapper may pass all names on
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
