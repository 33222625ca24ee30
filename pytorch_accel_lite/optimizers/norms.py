"""Norms of gradients that are sharded over one mesh, over several, or not at all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from accelerate import Accelerator

from pytorch_accel_lite.base.modules import local


def total_norm_of_shards(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the total norm of gradients, the same on all processes, as a plain tensor.

    torch computes norms only of gradients of the same mesh, so those of each mesh are combined.
    """
    by_mesh: dict[Any, list[torch.Tensor]] = {}
    for gradient in gradients:
        by_mesh.setdefault(getattr(gradient, "device_mesh", None), []).append(gradient)
    norms: list[Any] = [torch.nn.utils.get_total_norm(group) for group in by_mesh.values()]
    whole = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
    return whole[0] if len(whole) == 1 else torch.nn.utils.get_total_norm(whole)


def clip_shards(
    accelerator: Accelerator, parameters: Iterable[torch.nn.Parameter], value: float | None, norm: float | None
) -> torch.Tensor | None:
    """Clip gradients as ``clip_grad_value_`` and ``clip_grad_norm_`` do; return the norm before clipping it."""
    # Accelerate compares them with the parameters of every model it knows, which fails if there are several.
    accelerator.unscale_gradients()
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    own = [local(gradient) for gradient in gradients]
    if value is not None:
        torch._foreach_clamp_min_(own, -value)
        torch._foreach_clamp_max_(own, value)
    if norm is None:
        return None
    total = total_norm_of_shards(gradients)
    torch._foreach_mul_(own, torch.clamp(norm / (total + 1e-6), max=1.0))
    return total
