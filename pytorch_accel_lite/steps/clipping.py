"""Clipping gradients, and their total norm: of plain, sharded and divided gradients."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch.amp.grad_scaler import OptState

from pytorch_accel_lite.base.modules import are_sharded, local_shard
from pytorch_accel_lite.distributed.accelerator import replacing_method
from pytorch_accel_lite.optimizers.optimizer_parts import optimized_parameters
from pytorch_accel_lite.optimizers.optimizer_steps import states_of_scaler
from pytorch_accel_lite.run.request_and_config import TrainerRunConfig
from pytorch_accel_lite.run.run import ClippingOrder, Run, TrainerLike
from pytorch_accel_lite.run.trained_objects import updated_parameters


def clip_as_configured(trainer: TrainerLike, config: TrainerRunConfig) -> None:
    """Clip each element of the gradients and their total norm, as configured."""
    accelerator, run = trainer.accelerator, trainer.current_run
    value, norm = config.gradient_clip_value, config.gradient_clip_norm
    is_sharded = trainer.is_sharded
    in_shards = is_sharded and are_sharded(trainer.model.parameters())
    if is_sharded and not in_shards:
        # Accelerate lets an engine, such as FSDP1, clip its own shards, and only if it is asked to clip all of them.
        clipped = list(trainer.model.parameters())
    else:
        clipped = updated_parameters(trainer)
        ids = list(map(id, clipped))
        order = run.training_step.clipping_order
        if order is None or order.ids != ids:
            order = run.training_step.clipping_order = ClippingOrder(ids, _in_model_order(clipped, trainer.model))
        clipped = order.parameters
    if in_shards or are_sharded(clipped) or trainer.division.has_fixed_shares:
        run.training_step.gradient_norm = clip_shards(trainer, clipped, value, norm)
        return
    with _unscaled(trainer):
        if value is not None:
            accelerator.clip_grad_value_(clipped, value)
        if norm is not None:
            is_plain = trainer.prepared_model is not None and trainer.prepared_model.is_plain
            run.training_step.gradient_norm = (_clip_norm if is_plain else accelerator.clip_grad_norm_)(clipped, norm)


def _in_model_order(parameters: list[torch.nn.Parameter], model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Sort parameters in the order of the model, as the last bits of their norm depend on it; others come last."""
    positions = {id(parameter): index for index, parameter in enumerate(model.parameters())}
    return sorted(parameters, key=lambda parameter: positions.get(id(parameter), len(positions)))


def _clip_norm(parameters: list[torch.nn.Parameter], limit: float) -> torch.Tensor:
    """Clip like ``torch.nn.utils.clip_grad_norm_``, with the same operations, but without sorting gradients twice.

    In torch, sorting, and moving norms to the device where they already are, take longer than clipping a small model.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    device, dtype = (gradients[0].device, gradients[0].dtype) if gradients else (None, None)
    uniform = [g for g in gradients if type(g) is torch.Tensor and g.dtype is dtype and g.device == device]
    if device is None or device.type not in ("cpu", "cuda") or len(uniform) < len(gradients):
        return torch.nn.utils.clip_grad_norm_(parameters, limit)
    with torch.no_grad():
        total: torch.Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2.0)), 2.0)
        torch._foreach_mul_(gradients, torch.clamp(limit / (total + 1e-6), max=1.0))
    return total


def total_norm(trainer: TrainerLike) -> torch.Tensor:
    """Return the total norm of the gradients of an update, before they are clipped; computed once per update.

    Raises:
        RuntimeError: before the update of a step and, if the norm was not computed by then, after it
    """
    run = trainer.current_run
    step = run.training_step
    if step.gradient_norm is None:
        if not step.can_skip_update:
            raise RuntimeError(
                "trainer.gradient_norm is the norm of the gradients of an update, which are not complete yet, or "
                "cleared already. Read it in on_optimizer_step_start; then it is known until the step has ended."
            )
        # If optimizers are updated one by one, the gradients of this one are unscaled already.
        if trainer.accelerator.scaler is not None and not step.updates_one_by_one:
            unscale(trainer)
        step.gradient_norm = _norm_of(trainer, optimized_parameters(step.optimizer_to_update(trainer, run)))
    return step.gradient_norm


def unscale(trainer: TrainerLike) -> None:
    """Remove the loss scale from the gradients of an update, unless that has been done, as by clipping."""
    accelerator, optimizer = trainer.accelerator, trainer.optimizer
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    states = states_of_scaler(accelerator.scaler)
    if states is not None and states[id(optimizer)]["stage"] is OptState.READY:
        accelerator.unscale_gradients(trainer.optimizer)


def clip_keeping_norm(trainer: TrainerLike, run: Run) -> None:
    """Clip gradients by value or as overridden, which loses their norm: compute it before, if callbacks may read it.

    The gradients are unscaled, whether an overridden ``clip_gradients`` uses functions of torch or of Accelerate.
    """
    is_read = bool(trainer.callback_handler.listeners["on_optimizer_step_start"])
    norm = total_norm(trainer) if is_read else None
    with _unscaled(trainer):
        trainer.clip_gradients()
    if norm is not None:
        run.training_step.gradient_norm = norm


def _unscaled(trainer: TrainerLike) -> AbstractContextManager[None]:
    """Unscale the gradients; in the context that is returned, functions of Accelerate that clip do not do so again.

    A scaler refuses it the second time.
    """
    if trainer.accelerator.scaler is None:
        return nullcontext()
    if not trainer.current_run.training_step.updates_one_by_one:  # such a step has unscaled them
        unscale(trainer)
    return replacing_method(trainer.accelerator, "unscale_gradients", lambda optimizer=None: None)


def _norm_of(trainer: TrainerLike, parameters: list[torch.nn.Parameter]) -> torch.Tensor:
    """Return the total norm of the gradients of some parameters."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if trainer.division.has_fixed_shares:
        return trainer.division.total_norm(gradients, trainer.ranks)
    if are_sharded(parameters):
        return _norm_of_shards(gradients)
    return torch.nn.utils.get_total_norm(gradients)


def _norm_of_shards(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the total norm of gradients, the same on all processes, as a plain tensor.

    torch computes norms only within one mesh, so the norms of all meshes are combined.
    """
    by_mesh: dict[object, list[torch.Tensor]] = {}
    for gradient in gradients:
        by_mesh.setdefault(getattr(gradient, "device_mesh", None), []).append(gradient)
    norms: list[Any] = [torch.nn.utils.get_total_norm(group) for group in by_mesh.values()]
    full = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
    return full[0] if len(full) == 1 else torch.nn.utils.get_total_norm(full)


def clip_shards(
    trainer: TrainerLike, parameters: list[torch.nn.Parameter], value: float | None, norm: float | None
) -> torch.Tensor | None:
    """Clip gradients as ``clip_grad_value_`` and ``clip_grad_norm_`` do; return the norm before clipping it."""
    # Accelerate compares the parameters with those of every model it prepared, which fails if there are several.
    trainer.accelerator.unscale_gradients()
    shards = [local_shard(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if value is not None:
        torch._foreach_clamp_min_(shards, -value)
        torch._foreach_clamp_max_(shards, value)
    if norm is None:
        return None
    total = _norm_of(trainer, parameters)
    torch._foreach_mul_(shards, torch.clamp(norm / (total + 1e-6), max=1.0))
    return total
