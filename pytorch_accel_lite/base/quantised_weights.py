"""Weights that bitsandbytes or torchao have quantised: recognising them, and the plain tensors that they consist of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn


def is_quantised(parameter: torch.Tensor) -> bool:
    """Whether a parameter is of a class of bitsandbytes or torchao, which does not compute like a plain one."""
    return is_quantised_by(parameter, "bitsandbytes") or is_quantised_by(parameter, "torchao")


def is_frozen_and_quantised(parameter: torch.Tensor) -> bool:
    """Whether a parameter is quantised and not trained, unlike some parameters of torchao."""
    return not parameter.requires_grad and is_quantised(parameter)


def trained_and_quantised(model: nn.Module) -> list[str]:
    """Return the names of the quantised parameters of a model that are not frozen, although nothing can train them."""
    return [name for name, value in model.named_parameters() if value.requires_grad and is_quantised(value)]


def is_quantised_by(parameter: torch.Tensor, package: str) -> bool:
    """Whether a parameter is of a class of a package."""
    return type(parameter).__module__.partition(".")[0] == package


def quantised_entries(model: nn.Module, state: Iterable[str]) -> set[str]:
    """Return the names, in the state of a model, of the entries of its frozen quantised weights.

    Weights of bitsandbytes have further entries, such as ``"weight.absmax"``, or ``"SCB"`` beside ``"weight"``.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    quantised = {name for name, value in parameters.items() if is_frozen_and_quantised(value)}
    if not quantised:
        return set()
    plain = {*parameters, *(name for name, _ in model.named_buffers(remove_duplicate=False))} - quantised
    modules = {name.rpartition(".")[0] for name in quantised}
    inside = tuple(f"{name}." for name in quantised)
    beside = {name for name in state if name.rpartition(".")[0] in modules and name not in plain}
    return beside | {name for name in state if name.startswith(inside)}


def plain_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors that a tensor consists of: those inside a tensor of torchao, or the tensor itself."""
    if not is_quantised(tensor):
        return [tensor]
    flatten: Callable[[], tuple[list[str], object]] | None = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:  # a tensor of bitsandbytes, or a plain one
        return [tensor.data]
    return [part for name in flatten()[0] for part in plain_parts(getattr(tensor, name))]


def all_plain_parts(parameter: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors of a parameter; for a parameter of bitsandbytes, also its scales."""
    quant_state = getattr(parameter, "quant_state", None)
    scales: Mapping[str, object] = {} if quant_state is None else quant_state.as_dict(packed=True)
    return plain_parts(parameter) + [part for part in scales.values() if isinstance(part, torch.Tensor)]


def keep_as_they_are(model: nn.Module) -> None:
    """Keep bitsandbytes from repacking 4-bit weights when a CPU evaluates, because repacking rounds their scales."""
    for module in model.modules():
        if getattr(module, "support_avx512bf16_for_cpu", False):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
